"""Bridges to and from Gymnasium, and from the older three-method interface."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import subprocess
import sys
from typing import Any

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env as gymnasium_check_env
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, RecordEpisodeStatistics
from gymnasium.wrappers import TimeLimit as GymnasiumTimeLimit

import relax_gym
from relax_gym import Env, Message, StepResult, user, wrap_interaction_env
from relax_gym.errors import EnvError
from relax_gym.interop import GymnasiumTextEnv
from relax_gym.testing import assert_env


class Echo(Env):
    """Repeats what is said; ends on "stop"."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        super().reset(seed=seed)
        return user(f"word {self.rng.randrange(100)}"), {}

    def step(self, action: str) -> StepResult:
        return StepResult(user(action), 1.0, action == "stop", False, {})


def test_gymnasiums_own_wrappers_work() -> None:
    env = RecordEpisodeStatistics(GymnasiumTimeLimit(OrderEnforcing(PassiveEnvChecker(Echo())), max_episode_steps=2))
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("early")
    env.reset(seed=0)
    assert env.step("a")[:4] == (user("a"), 1.0, False, False)
    observation, reward, terminated, truncated, info = env.step("b")
    assert (observation, reward, terminated, truncated) == (user("b"), 1.0, False, True)
    assert (info["episode"]["r"], info["episode"]["l"]) == (2.0, 2)


def test_gymnasiums_own_checker_passes_on_a_small_env() -> None:
    env = Echo()
    env.spec = gymnasium.envs.registration.EnvSpec("test/Echo-v0", entry_point=Echo)
    gymnasium_check_env(env, skip_render_check=True)


@pytest.mark.parametrize(
    "script",
    [
        "import relax_gym; env = gymnasium.make('relax_gym/GuessNumber-v0')",
        "import relax_gym_envs; env = gymnasium.make('relax_gym/GuessNumber-v0')",
        "env = gymnasium.make('relax_gym:relax_gym/GuessNumber-v0')",
    ],
)
def test_gymnasium_makes_our_envs(script: str) -> None:
    script = f"import gymnasium, sys; {script}; print(env.reset(seed=0)[0][0]['role'], 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "user False"


class Quiz:
    """The older interface at its plainest."""

    def __init__(self) -> None:
        self.closed = 0

    def reset(self) -> str:
        self.asked = 1
        return "1 + 1?"

    def step(self, response: str) -> tuple[str, bool, dict[str, Any]]:
        return "right" if response == "2" else "wrong", response == "2", {"score": float(response == "2")}

    def format_observation(self, observation: str) -> Message:
        return {"role": "user", "content": f"Q: {observation}"}

    def close(self) -> None:
        self.closed += 1


def test_an_env_of_the_older_interface_is_wrapped() -> None:
    quiz = Quiz()
    tools = [{"type": "function", "function": {"name": "f"}}]
    env = wrap_interaction_env(quiz, tools=tools, initial=[{"role": "system", "content": "Think."}])
    assert isinstance(env, Env)
    assert env.tools == tools
    assert env.reset(seed=0) == ([{"role": "system", "content": "Think."}, *user("Q: 1 + 1?")], {})
    assert env.step("3") == StepResult(user("Q: wrong"), 0.0, False, False, {"score": 0.0})
    assert env.step("2") == StepResult(user("Q: right"), 1.0, True, False, {"score": 1.0})
    env.close()
    assert quiz.closed == 1


def test_a_factory_builds_a_fresh_env_for_every_episode_and_closes_the_last() -> None:
    built: list[Quiz] = []

    def factory() -> Quiz:
        built.append(Quiz())
        return built[-1]

    env = wrap_interaction_env(factory)
    with pytest.raises(EnvError, match=r"step\(\) came before reset"):
        env.step("2")
    env.reset(seed=0)
    env.reset(seed=1)
    env.close()
    assert [quiz.closed for quiz in built] == [1, 1]
    assert wrap_interaction_env(Quiz).reset(seed=0)[0] == user("Q: 1 + 1?")


class AsyncQuiz(Quiz):
    """The same, async, with seed, options and parts."""

    async def reset(self, seed: int, **more: Any) -> tuple[int, dict[str, Any]]:  # type: ignore[override]
        await asyncio.sleep(0)
        return seed, more

    async def step(self, response: str) -> tuple[None, bool, dict[str, Any]]:  # type: ignore[override]
        await asyncio.sleep(0)
        return None, True, {"reward": 0.5, "score": 0.1}

    async def format_observation(self, observation: int) -> list[dict[str, Any]]:  # type: ignore[override]
        await asyncio.sleep(0)
        return [{"type": "text", "text": f"seed {observation}"}]

    async def close(self) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        self.closed += 1


def finish(value: Any) -> Any:
    async def wait() -> Any:
        return await value

    assert inspect.isawaitable(value)
    return asyncio.run(wait())


def test_async_methods_of_the_older_interface_work() -> None:
    built: list[AsyncQuiz] = []

    def factory() -> AsyncQuiz:
        built.append(AsyncQuiz())
        return built[-1]

    env = wrap_interaction_env(factory)
    assert finish(env.reset(seed=7, options={"a": 1})) == (
        user([{"type": "text", "text": "seed 7"}]),
        {"options": {"a": 1}},
    )
    assert finish(env.step("x")) == StepResult([], 0.5, True, False, {"reward": 0.5, "score": 0.1})
    assert finish(env.reset(seed=8))[0] == user([{"type": "text", "text": "seed 8"}])
    finish(env.close())
    assert [quiz.closed for quiz in built] == [1, 1]


@pytest.mark.parametrize(
    ("formatted", "messages"),
    [
        (None, []),
        ("", []),
        ("hi", user("hi")),
        ({"role": "tool", "content": "x"}, [{"role": "tool", "content": "x"}]),
        (user("a") + user("b"), user("a") + user("b")),
        ([{"type": "image", "image": b"1"}], user([{"type": "image", "image": b"1"}])),
    ],
)
def test_every_form_of_format_observation(formatted: Any, messages: list[Message]) -> None:
    class Plain:
        def reset(self) -> Any:
            return "something"

        def step(self, response: str) -> Any:
            return None, True, None

        def format_observation(self, observation: Any) -> Any:
            return formatted

    env = wrap_interaction_env(Plain())
    assert env.reset(seed=0) == (messages, {})
    assert env.step("x") == StepResult([], 0.0, True, False, {})
    env.close()


def test_what_is_not_the_older_interface_is_refused() -> None:
    class Odd(Quiz):
        def step(self, response: str) -> Any:
            return "obs", 1.0, True, {}

        def format_observation(self, observation: Any) -> Any:
            return 3

    with pytest.raises(EnvError, match=r"returns \(observation, done, info\)"):
        wrap_interaction_env(Odd()).step("x")
    with pytest.raises(EnvError, match="format_observation returned 3; it must return a message"):
        wrap_interaction_env(Odd()).reset(seed=0)
    with pytest.raises(EnvError, match=r"'quiz' is neither an env with step\(\) nor a function"):
        wrap_interaction_env("quiz")


def frozen_lake() -> GymnasiumTextEnv:
    return GymnasiumTextEnv("FrozenLake-v1", actions=("left", "down", "right", "up"), is_slippery=False)


def test_frozen_lake_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pygame", None)  # importing it fails: words need no screen
    env = frozen_lake()
    messages, _ = env.reset(seed=0)
    assert messages == user(
        "You are playing FrozenLake-v1. Answer with one action: 0 (left), 1 (down), 2 (right), 3 (up).\n\n"
        "[S]FFF\nFHFH\nFFFH\nHFFG"
    )
    assert env.step("I could go down, but I go Right.").observation == user("  (Right)\nS[F]FF\nFHFH\nFFFH\nHFFG")
    told = env.step("sideways, 7, or 1.5 steps")
    assert told == StepResult(
        user("That is not a legal action. Answer with one action: 0 (left), 1 (down), 2 (right), 3 (up)."),
        0.0,
        False,
        False,
        {"legal": False},
    )
    results = [env.step(action) for action in ("left", "1", "down", "right", "down", "right", "right")]
    assert [result.reward for result in results] == [0, 0, 0, 0, 0, 0, 1]
    assert results[-1].terminated
    env.close()


def test_blackjack_in_words_with_own_parser_and_rendering() -> None:
    env = GymnasiumTextEnv("Blackjack-v1", actions=("stick", "hit"), intro="Beat the dealer.")
    assert env.reset(seed=1)[0] == user(
        "Beat the dealer. Answer with one action: 0 (stick), 1 (hit).\n\nObservation: (20, 7, 0)"
    )
    own = GymnasiumTextEnv(
        "Blackjack-v1",
        parse=lambda text: {"more": 1, "odd": 9}.get(text),
        render=lambda observation, game: f"You have {observation[0]}.",
    )
    assert own.reset(seed=1)[0][0]["content"].endswith("Answer with one action: 0, 1.\n\nYou have 20.")
    assert own.step("odd").info == {"legal": False}
    assert own.step("1").info == {"legal": False}
    result = own.step("more")
    assert (result.observation, result.reward, result.terminated) == (user("You have 22."), -1.0, True)


def test_games_keep_the_contract_and_can_be_pickled() -> None:
    assert_env(frozen_lake)
    assert_env(GymnasiumTextEnv, env_id="Blackjack-v1", actions=("stick", "hit"))
    env = frozen_lake()
    env.reset(seed=0)
    env.step("down")
    other = frozen_lake()
    other.set_state(pickle.loads(pickle.dumps(env.get_state())))
    assert other.step("down").observation == user("  (Down)\nSFFF\nFHFH\n[F]FFH\nHFFG")


def test_games_that_cannot_be_played_in_words_are_refused() -> None:
    with pytest.raises(EnvError, match="Gymnasium has no env 'FrozenPond-v1'"):
        GymnasiumTextEnv("FrozenPond-v1")
    with pytest.raises(EnvError, match="Gymnasium has no env 'no_such_module:Pond-v1': No module named"):
        GymnasiumTextEnv("no_such_module:Pond-v1")
    with pytest.raises(EnvError, match="3 action names for Blackjack-v1, which has 2 actions"):
        GymnasiumTextEnv("Blackjack-v1", actions=("a", "b", "c"))
    with pytest.raises(EnvError, match="has ActionText actions; only Discrete ones can be named in words"):
        GymnasiumTextEnv("relax_gym/GuessNumber-v0")


def test_wrap_interaction_env_is_public() -> None:
    assert relax_gym.wrap_interaction_env is wrap_interaction_env
