"""Wrappers on sync and async envs."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from relax_gym import Env, Message, RecordEpisode, StepResult, TimeLimit, TokenBudget, user
from relax_gym.errors import EnvError
from relax_gym.wrappers import ChatWrapper, SystemPrompt, TransformReward


class Counter(Env):
    """Counts steps; ends at `length` with the count as reward."""

    tools = ({"type": "function", "function": {"name": "count"}},)
    thread_affinity = True

    def __init__(self, length: int = 3) -> None:
        self.length, self.count, self.closed = length, 0, 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        super().reset(seed=seed)
        self.count = 0
        return user(f"seed {seed}"), {"options": options}

    def step(self, action: str) -> StepResult:
        self.count += 1
        done = self.count >= self.length
        return StepResult(
            [] if done else user(f"count {self.count}"), float(self.count), done, False, {"n": self.count}
        )

    def close(self) -> None:
        self.closed += 1

    def expert_action(self) -> str:
        return f"expert {self.count}"


class AsyncCounter(Env):
    """The same, async."""

    def __init__(self, length: int = 3) -> None:
        self.inner = Counter(length)

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:  # type: ignore[override]
        await asyncio.sleep(0)
        return self.inner.reset(seed=seed, options=options)

    async def step(self, action: str) -> StepResult:  # type: ignore[override]
        await asyncio.sleep(0)
        return self.inner.step(action)

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.inner.close()


def finish(value: Any) -> Any:
    async def wait() -> Any:
        return await value

    return asyncio.run(wait()) if inspect.isawaitable(value) else value


both = pytest.mark.parametrize("env_class", [Counter, AsyncCounter])


@both
def test_time_limit_truncates_at_the_limit(env_class: type[Env]) -> None:
    env = TimeLimit(env_class(length=3), max_turns=2)
    for _ in range(2):
        finish(env.reset(seed=0))
        assert [finish(env.step("x"))[2:4] for _ in range(2)] == [(False, False), (False, True)]
    with pytest.raises(ValueError, match="max_turns is 0; it must be at least 1"):
        TimeLimit(env_class(), max_turns=0)


def test_a_wrapper_is_awaitable_exactly_when_the_env_is() -> None:
    assert finish(TimeLimit(AsyncCounter(), 2).reset(seed=4)) == (user("seed 4"), {"options": None})
    step = TimeLimit(AsyncCounter(), 2).step("x")
    assert inspect.isawaitable(step)
    assert finish(step).info == {"n": 1}
    assert isinstance(TimeLimit(Counter(), 2).step("x"), StepResult)


@both
def test_token_budget_counts_observations_and_actions(env_class: type[Env]) -> None:
    env = TokenBudget(env_class(length=9), lambda text: len(text.split()), max_tokens=9)
    _, info = finish(env.reset(seed=0))
    assert info["tokens_used"] == 2
    first, second = finish(env.step("one two")), finish(env.step("three"))
    assert (first.info["tokens_used"], first.truncated) == (6, False)
    assert (second.info["tokens_used"], second.truncated) == (9, True)
    assert finish(env.reset(seed=0))[1]["tokens_used"] == 2


def test_token_budget_takes_a_tokenizer_and_reads_text_parts() -> None:
    class Letters:
        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            assert not add_special_tokens
            return list(text.encode())

    class Parts(Counter):
        def reset(self, **kwargs: Any) -> Any:
            super().reset(**kwargs)
            return user([{"type": "text", "text": "abc"}, {"type": "image", "image": b"12345"}]), {}

    assert TokenBudget(Parts(), Letters(), max_tokens=100).reset(seed=0)[1] == {"tokens_used": 3}


@both
def test_transform_reward(env_class: type[Env]) -> None:
    env = TransformReward(env_class(), lambda reward: -2 * reward)
    finish(env.reset(seed=0))
    assert [finish(env.step("x")).reward for _ in range(2)] == [-2.0, -4.0]


def test_system_prompt_comes_first_or_replaces_the_one_that_is_there() -> None:
    once = SystemPrompt(Counter(), "Be brief.")
    assert once.reset(seed=1)[0] == [{"role": "system", "content": "Be brief."}, *user("seed 1")]
    twice = SystemPrompt(once, "Be long.")
    assert twice.reset(seed=1)[0] == [{"role": "system", "content": "Be long."}, *user("seed 1")]


@both
def test_record_episode_writes_one_line_for_each_episode(env_class: type[Env], tmp_path: Path) -> None:
    env = RecordEpisode(env_class(length=2), tmp_path / "new" / "folder")
    finish(env.reset(seed=5, options={"level": 1}))
    finish(env.step("a"))
    finish(env.step("b"))
    finish(env.step("after the end"))
    finish(env.reset(seed=6))
    finish(env.step("c"))
    finish(env.reset(seed=7))
    finish(env.close())
    first, second, third = map(json.loads, env.path.read_text().splitlines())
    assert env.path == tmp_path / "new" / "folder" / "episodes.jsonl"
    assert first == {
        "env_id": env_class.__name__,
        "episode": 0,
        "seed": 5,
        "options": {"level": 1},
        "messages": [
            {"role": "user", "content": "seed 5"},
            {"role": "assistant", "content": "a"},
            {"role": "user", "content": "count 1"},
            {"role": "assistant", "content": "b"},
        ],
        "actions": ["a", "b"],
        "rewards": [1.0, 2.0],
        "return": 3.0,
        "terminated": True,
        "truncated": False,
    }
    assert (second["episode"], second["seed"], second["actions"], second["terminated"]) == (1, 6, ["c"], False)
    assert (third["episode"], third["seed"], third["actions"], third["return"]) == (2, 7, [], 0)


def test_record_episode_describes_media_and_unscored_rewards(tmp_path: Path) -> None:
    class Gallery(Counter):
        def reset(self, **kwargs: Any) -> Any:
            super().reset(**kwargs)
            values = [np.zeros((2, 3, 3), np.uint8), b"12345", Path("cat.png"), "data:image/png;base64," + "A" * 300]
            return user([{"type": "text", "text": "look"}, *({"type": "image", "image": v} for v in values)]), {}

        def step(self, action: str) -> StepResult:
            return StepResult([], math.nan, True, False, {})

    env = RecordEpisode(Gallery(), tmp_path)
    env.reset(seed=0)
    env.step("nice")
    line = json.loads(env.path.read_text())
    assert line["messages"][0]["content"] == [
        {"type": "text", "text": "look"},
        {"type": "image", "image": "<ndarray (2, 3, 3)>"},
        {"type": "image", "image": "<bytes 5>"},
        {"type": "image", "image": "cat.png"},
        {"type": "image", "image": "data:image/png;base64," + "A" * 38 + "… (322 characters)"},
    ]
    assert (line["rewards"], line["return"]) == ([None], None)


def test_what_the_wrapper_lacks_is_the_inner_envs(tmp_path: Path) -> None:
    inner = Counter()
    env = RecordEpisode(TimeLimit(gymnasium.Wrapper(inner), 5), tmp_path)
    env.reset(seed=0)
    assert env.tools == Counter.tools
    assert env.thread_affinity is True
    assert env.expert_action() == "expert 0"
    assert env.max_turns == 5
    assert env.unwrapped is inner
    assert not hasattr(env, "random_action")
    with pytest.raises(AttributeError, match="random_action"):
        env.random_action()
    env.close()
    assert inner.closed == 1


def test_close_of_an_async_env_is_awaitable_and_closes_once() -> None:
    env = TimeLimit(AsyncCounter(), 2)
    finish(env.close())
    assert env.unwrapped.inner.closed == 1  # type: ignore[attr-defined]


def test_state_holds_the_wrappers_own(tmp_path: Path) -> None:
    def build(folder: str) -> Any:
        counted = TokenBudget(TimeLimit(Counter(length=9), max_turns=3), len, max_tokens=1000)
        return RecordEpisode(counted, tmp_path / folder)

    one, other = build("one"), build("other")
    one.reset(seed=3)
    one.step("ab")
    state = one.get_state()
    assert state["env"]["wrapper"] == {"tokens_used": 15}
    assert state["env"]["env"]["wrapper"] == {"turns": 1}
    expected = [one.step("cd"), one.step("ef")]
    other.set_state(state)
    assert [other.step("cd"), other.step("ef")] == expected
    assert expected[-1].truncated
    assert other.path.read_text() == one.path.read_text()


def test_a_broken_step_is_named() -> None:
    class Broken(Counter):
        def step(self, action: str) -> Any:
            return user("hi"), "much", False, False, {}

    env = TimeLimit(Broken(), 2)
    env.reset(seed=0)
    with pytest.raises(EnvError, match="step returned reward 'much'; it must be a number"):
        env.step("x")


def test_own_wrappers_need_only_the_hooks() -> None:
    class Shout(ChatWrapper):
        def after_step(self, action: str, result: StepResult) -> StepResult:
            return result._replace(info={"action": action.upper()})

    assert Shout(Counter()).step("x").info == {"action": "X"}
    assert finish(Shout(AsyncCounter()).step("x")).info == {"action": "X"}


def test_a_spec_given_to_a_wrapper_is_the_inner_envs() -> None:
    inner = Counter()
    env = TimeLimit(inner, 1)
    env.spec = gymnasium.envs.registration.EnvSpec("wrapped/Counter-v0", entry_point=Counter)
    assert inner.spec is not None
    assert (inner.spec.id, env.spec.id) == ("wrapped/Counter-v0", "wrapped/Counter-v0")
