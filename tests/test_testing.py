"""The testing kit: it says yes to what is right and names what is wrong."""

from __future__ import annotations

import asyncio
import itertools
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_gym import (
    Batch,
    Completion,
    Env,
    FinishReason,
    SamplingParams,
    StepResult,
    StopReason,
    Task,
    Trajectory,
    user,
)
from relax_gym.chat import ChatRenderer
from relax_gym.errors import ModelError, SamplerError
from relax_gym.testing import (
    RecordingLearner,
    ScriptedRequest,
    ScriptedSampler,
    assert_env,
    check_env,
    check_reward,
    tiny_tokenizer,
)

POINTS = "build play spaces tools media expert_action random_action seed state garbage time close"


class Good(Env):
    """Say the number; three tries."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.number, self.tries = self.rng.randrange(10), 0
        self.own = random.Random(seed)
        return user([{"type": "text", "text": "say it"}, {"type": "image", "image": np.full((2, 2), self.number)}]), {}

    def step(self, action: str) -> Any:
        self.tries += 1
        right = action == str(self.number)
        hint = self.rng.randrange(1000)
        return StepResult(user(f"hint {hint}"), float(right), right, self.tries == 3, {})

    def expert_action(self) -> str:
        return str(self.number)

    def random_action(self) -> str:
        return str(self.own.randrange(10))


class GoodAsync(Good):
    """The same, async."""

    async def reset(self, **kwargs: Any) -> Any:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().reset(**kwargs)

    async def step(self, action: str) -> Any:
        await asyncio.sleep(0)
        return super().step(action)

    async def close(self) -> None:  # type: ignore[override]
        await asyncio.sleep(0)


class Plain(Env):
    """Without helpers."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return user("hello"), {}

    def step(self, action: str) -> Any:
        return user(action[::-1]), 0.5, False, False, {}


@pytest.mark.parametrize("env", [Good, GoodAsync, Plain, Good(), lambda: Good(), "relax_gym/GuessNumber-v0"])
def test_right_envs_pass_every_point(env: Any) -> None:
    results = check_env(env)
    assert [result for result in results if not result.passed] == []
    assert " ".join(result.name for result in results) == POINTS
    assert_env(env)


def details(env: Any, **arguments: Any) -> dict[str, str]:
    return {result.name: result.detail for result in check_env(env, **arguments)}


def test_results_say_what_was_seen() -> None:
    seen = details(Good)
    assert seen["play"].startswith("3 episodes, ")
    assert seen["play"].endswith(" ended, sync")
    assert details(GoodAsync)["play"].endswith(" ended, async")
    assert seen["expert_action"] == "1 turns, ended, return 1"
    assert seen["media"] == "3 image, 3 text"
    assert details(Plain)["expert_action"] == "not offered"
    assert details(Good())["seed"] == "same seed, same episode (only in the same env; give a class to check more)"
    assert details(Plain, actions=["a", "b"], episodes=1)["play"] == "1 episodes, 2 turns, 0 ended, sync"
    assert details("relax_gym/GuessNumber-v0", style="terse")["build"] == "GuessNumber"
    assert details("relax_gym/GuessNumber-v0", styl="terse")["build"].startswith("ConfigError: env 'relax_gym/Guess")


class GlobalDice(Good):
    def step(self, action: str) -> Any:
        return super().step(action)._replace(observation=user(str(random.random())))


class CarriesOver(Good):
    games = 0

    def reset(self, **kwargs: Any) -> Any:
        observation, info = super().reset(**kwargs)
        self.games += 1
        return [*observation, *user(f"game {self.games}")], info


_made = itertools.count()


class KnowsItsNumber(Good):
    def __init__(self) -> None:
        self.made = next(_made)

    def step(self, action: str) -> Any:
        return super().step(action)._replace(reward=float(self.made))


class BadRole(Good):
    def step(self, action: str) -> Any:
        return super().step(action)._replace(observation=[{"role": "robot", "content": "beep"}])


class RewardText(Good):
    def step(self, action: str) -> Any:
        return super().step(action)._replace(reward="1.0")


class NoInfo(Good):
    def reset(self, **kwargs: Any) -> Any:
        return super().reset(**kwargs)[0]


class Locked(Good):
    def __init__(self) -> None:
        self.lock = threading.Lock()


class Forgetful(Good):
    def get_state(self) -> dict[str, Any]:
        return {"number": self.number, "tries": self.tries, "own": self.own}


class Slow(Good):
    def reset(self, **kwargs: Any) -> Any:
        time.sleep(0.02)
        return super().reset(**kwargs)


class Fragile(Good):
    def step(self, action: str) -> Any:
        return super().step(str(int(action)))


class Grows(Plain):
    def reset(self, **kwargs: Any) -> Any:
        super().reset(**kwargs)
        self.history = user("hello")
        return self.history, {}

    def step(self, action: str) -> Any:
        self.history[0]["content"] += action + "!"
        return user("go on"), 0.0, False, False, {}


class Mute(Good):
    def expert_action(self) -> Any:
        return 3


class NarrowActions(Good):
    def random_action(self) -> str:
        return "x" * 2_000_000


class BadTools(Good):
    tools = ({"name": "add"},)


class BadMedia(Good):
    def step(self, action: str) -> Any:
        return super().step(action)._replace(observation=user([{"type": "audio", "audio": 3.5}]))


class DoorJams(Good):
    def close(self) -> None:
        raise OSError("the door jams")


class Unbuildable(Good):
    def __init__(self) -> None:
        raise ValueError("no licence")


@pytest.mark.parametrize(
    ("env", "point", "detail"),
    [
        (GlobalDice, "seed", "seed 0 again in the same env: turn 0 differs"),
        (CarriesOver, "seed", "seed 0 again in the same env: the first observation differs"),
        (KnowsItsNumber, "seed", "seed 0 again in a fresh env: turn 0 differs"),
        (BadRole, "play", "message 0 has role 'robot'; allowed: system, user, assistant, tool"),
        (RewardText, "play", "step returned reward '1.0'; it must be a number"),
        (NoInfo, "play", "it must return (messages, info dict)"),
        (Locked, "state", "get_state() cannot be pickled"),
        (Forgetful, "state", "resumed from get_state() at turn"),
        (Fragile, "garbage", "step('') failed: ValueError: invalid literal for int()"),
        (Grows, "play", "step changed the messages it had returned before"),
        (Mute, "play", "an action must be text, but the env offers 3"),
        (NarrowActions, "spaces", "action_space does not contain 'xxx"),
        (BadTools, "tools", "{'name': 'add'} is not {'type': 'function'"),
        (BadMedia, "media", "an audio part holds float; give an image, array, path, URL or bytes"),
        (DoorJams, "close", "OSError: the door jams"),
        (Unbuildable, "build", "ValueError: no licence"),
    ],
)
def test_a_broken_env_is_caught_at_its_point(env: Any, point: str, detail: str) -> None:
    actions = ["1", "2", "3"] if env is Fragile else None
    broken = {result.name: result.detail for result in check_env(env, actions=actions) if not result.passed}
    assert detail in broken[point]
    with pytest.raises(AssertionError, match=f"breaks the env contract:\n(.*\n)*- {point}: "):
        assert_env(env, actions=actions)


def test_a_slow_env_is_caught() -> None:
    assert "allowed are 0.01" in details(Slow, max_seconds=0.01)["time"]
    assert [result.passed for result in check_env(Slow) if result.name == "time"] == [True]


def test_an_env_may_say_that_it_cannot_be_resumed() -> None:
    class Browser(Locked):
        def get_state(self) -> dict[str, Any]:
            raise NotImplementedError

    assert_env(Browser)
    assert details(Browser)["state"] == "the env says that it cannot be resumed"


def test_every_env_the_checker_builds_is_closed_once() -> None:
    closes: list[int] = []

    class Closing(Good):
        def close(self) -> None:
            closes.append(id(self))

    built: list[Env] = []

    def factory() -> Env:
        built.append(Closing())
        return built[-1]

    assert_env(factory)
    assert sorted(closes) == sorted(map(id, built))
    with pytest.raises(ValueError, match="episodes is 0"):
        check_env(Good, episodes=0)


def trajectory(text: str) -> Trajectory:
    message = {"role": "user", "content": text}
    return Trajectory(
        task=Task(env_id="test/Env-v0", seed=3),
        episode_id=f"e-{text}",
        turns=(),
        stop_reason=StopReason.ENV_DONE,
        final_observation=(message,),
    )


async def async_length(trajectory: Trajectory) -> float:
    await asyncio.sleep(0)
    return float(len(trajectory.final_observation[0]["content"]))


def unscored(trajectory: Trajectory) -> float | None:
    return None if trajectory.final_observation[0]["content"] == "ab" else float("nan")


def test_right_rewards_pass() -> None:
    episodes = [trajectory("ab"), trajectory("abcd")]
    results = check_reward(async_length, episodes)
    assert [result.name for result in results] == ["number", "repeat", "read-only", "thread"]
    assert all(result.passed for result in results)
    assert results[0].detail == "2 scored, 0 unscored, 2 to 4"
    results = check_reward(unscored, episodes)
    assert all(result.passed for result in results)
    assert results[0].detail == "0 scored, 2 unscored"


def in_main_only(trajectory: Trajectory) -> float:
    return float(threading.current_thread() is threading.main_thread())


def vandal(trajectory: Trajectory) -> float:
    trajectory.final_observation[0]["content"] += "!"
    return 0.0


def crash(trajectory: Trajectory) -> float:
    raise KeyError("gold")


@pytest.mark.parametrize(
    ("reward", "point", "detail"),
    [
        (lambda t: "1", "number", "gave '1' for episode e-ab; it must give a number or None"),
        (lambda t: True, "number", "gave True for episode e-ab"),
        (crash, "number", "failed on episode e-ab of test/Env-v0 seed 3: KeyError: 'gold'"),
        (lambda t: next(_made), "repeat", "for the same episode e-ab"),
        (vandal, "read-only", "changed episode e-ab; rewards must only read it"),
        (in_main_only, "thread", "gave 1.0 here and 0.0 in a worker thread"),
    ],
)
def test_k71_a_broken_reward_is_caught_at_its_point(reward: Callable[..., Any], point: str, detail: str) -> None:
    broken = {result.name: result.detail for result in check_reward(reward, [trajectory("ab")]) if not result.passed}
    assert detail in broken[point]


PARAMS = SamplingParams(max_new_tokens=8)
A, B, EOS = 67, 68, 2


def play(
    sampler: ScriptedSampler, prompts: Sequence[Sequence[int]], params: SamplingParams = PARAMS
) -> list[Completion]:
    async def session() -> list[Completion]:
        opened = sampler.open_session()
        try:
            return [await opened.generate(prompt, params) for prompt in prompts]
        finally:
            opened.close()
            opened.close()

    return asyncio.run(session())


def test_scripted_replies_come_turn_by_turn() -> None:
    given = Completion(token_ids=(9,), logprobs=(-2.0,), versions=(7,), finish_reason=FinishReason.ABORT)
    sampler = ScriptedSampler(["ab", [5, 6], given, "abababababab"])
    assert sampler.version == -1
    first, second, third, fourth = play(sampler, [[1], [1, 2], [3], [4]])
    assert first.token_ids == (A, B, EOS)
    assert (first.logprobs, first.versions, first.finish_reason) == ((-0.5,) * 3, (-1,) * 3, FinishReason.STOP)
    assert (second.token_ids, second.finish_reason) == ((5, 6), FinishReason.STOP)
    assert third is given
    assert (fourth.token_ids, fourth.finish_reason) == ((A, B) * 4, FinishReason.LENGTH)
    assert sampler.requests[1] == ScriptedRequest(session=0, turn=1, prompt_ids=(1, 2), params=PARAMS)
    assert (sampler.opened, sampler.closed_sessions, sampler.open_sessions) == (1, 1, 0)
    assert (sampler.metrics(), sampler.metrics()) == ({"requests": 4.0}, {"requests": 0.0})


def test_a_script_may_be_a_function_and_may_fail() -> None:
    def script(prompt_ids: Sequence[int], params: SamplingParams, turn: int) -> Any:
        return RuntimeError("engine died") if turn == 1 else [len(prompt_ids), params.max_new_tokens]

    sampler = ScriptedSampler(script, keep_requests=False)
    assert play(sampler, [[1, 2, 3]])[0].token_ids == (3, 8)
    with pytest.raises(RuntimeError, match="engine died"):
        play(sampler, [[1], [1]])
    assert sampler.open_sessions == 0
    assert sampler.requests == []
    with pytest.raises(SamplerError, match="the script has 1 replies, but a session asked for turn 1"):
        play(ScriptedSampler(["a"]), [[1], [1]])


def test_new_tokens_carry_the_published_version_and_the_context_is_bounded() -> None:
    async def run() -> tuple[Completion, ScriptedSampler]:
        sampler = ScriptedSampler(["aaaa"], max_context=5)
        await sampler.start()
        await sampler.update_weights(iter([]), 3)
        session = sampler.open_session()
        completion = await session.generate([1, 1, 1], PARAMS)
        with pytest.raises(SamplerError, match="the prompt has 5 tokens; max_context is 5"):
            await session.generate([1] * 5, PARAMS)
        session.close()
        with pytest.raises(SamplerError, match="session 0 is closed"):
            await session.generate([1], PARAMS)
        await sampler.aclose()
        await sampler.aclose()
        with pytest.raises(SamplerError, match="the sampler is closed"):
            sampler.open_session()
        return completion, sampler

    completion, sampler = asyncio.run(run())
    assert (completion.token_ids, completion.versions) == ((A, A), (3, 3))
    assert completion.finish_reason is FinishReason.LENGTH
    assert (sampler.started, sampler.published, sampler.version, sampler.closed) == (1, [3], 3, True)


def test_delay_is_counted_in_turns_of_the_loop_and_can_be_cancelled() -> None:
    async def run() -> list[int]:
        sampler = ScriptedSampler(["a", "a"], delay=3)
        task = asyncio.create_task(sampler.open_session().generate([1], PARAMS))
        turns = 0
        while not task.done():
            turns += 1
            await asyncio.sleep(0)
        task = asyncio.create_task(sampler.open_session().generate([1], PARAMS))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return [turns, sampler.cancelled, len(sampler.requests)]

    assert asyncio.run(run()) == [4, 1, 2]


def test_tiny_tokenizer_round_trips_any_text_and_renders_chat() -> None:
    tokenizer = tiny_tokenizer(extra_special=("<|image_pad|>",))
    text = "héllo 漢\n\x00<|im_start|><|image_pad|>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids[-2:] == [1, 3]
    assert tokenizer.decode(ids) == text
    assert (len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id) == (260, 0, 2)
    conversation = ChatRenderer(tiny_tokenizer()).conversation()
    rendered = conversation.observe(user("hi"))
    assert tiny_tokenizer().decode(rendered.context_ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    own = tiny_tokenizer(chat_template="{{ messages[0]['content'] }}")
    assert own.apply_chat_template(user("hi"), tokenize=False) == "hi"


def test_recording_learner_keeps_batches_and_its_version(tmp_path: Path) -> None:
    learner = RecordingLearner(metrics={"loss": 2.0})
    batch = Batch(version=0, samples=())
    assert learner.step(batch) == {"loss": 2.0}
    assert learner.imitate(batch, lr=1e-3) == {"loss": 2.0}
    assert (learner.version, learner.batches, learner.imitated) == (1, [batch], [batch])
    assert list(learner.weights()) == []
    learner.export(tmp_path / "a")
    learner.save_state(tmp_path / "a")
    other = RecordingLearner()
    other.load(tmp_path / "a")
    assert other.version == 1
    learner.step(batch)
    learner.save_state(tmp_path / "a")
    with pytest.raises(ModelError, match="weights of version 1 and state of version 2"):
        other.load(tmp_path / "a")
    with pytest.raises(ModelError, match=r"recording_learner\.json is missing"):
        other.load(tmp_path / "b")
    learner.close()
    assert learner.closed == 1


def test_the_kit_imports_neither_torch_nor_transformers() -> None:
    script = "import relax_gym.testing, sys; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
