"""The checker of envs says yes to what is right and names what is wrong."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from typing import Any

import numpy as np
import pytest

from relax_gym import Env, StepResult, user
from relax_gym.testing import assert_env, check_env

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
        time.sleep(0.004)
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
    assert "allowed are 0.002" in details(Slow, max_seconds=0.002)["time"]
    assert [result.passed for result in check_env(Slow) if result.name == "time"] == [True]


class Stuck(Good):
    """Never comes back from one of its calls."""

    def __init__(self, call: str) -> None:
        self.call = call
        self.hang("constructor")

    def hang(self, call: str) -> None:
        if call == self.call:
            never.wait(30)

    def reset(self, **kwargs: Any) -> Any:
        self.hang("reset")
        return super().reset(**kwargs)

    def step(self, action: str) -> Any:
        self.hang("step")
        return super().step(action)

    def expert_action(self) -> str:
        self.hang("expert_action")
        return super().expert_action()

    def get_state(self) -> dict[str, Any]:
        self.hang("get_state")
        return super().get_state()

    def close(self) -> None:
        self.hang("close")


class StuckAsync(Stuck):
    """The same with coroutines that wait for ever."""

    async def reset(self, **kwargs: Any) -> Any:  # type: ignore[override]
        if self.call == "reset":
            await asyncio.Event().wait()
        return super().reset(**kwargs)

    async def close(self) -> None:  # type: ignore[override]
        if self.call == "close":
            await asyncio.Event().wait()


never = threading.Event()


@pytest.mark.parametrize("env", [Stuck, StuckAsync])
@pytest.mark.parametrize(
    ("call", "point"),
    [
        ("constructor", "build"),
        ("reset", "play"),
        ("step", "play"),
        ("expert_action", "play"),
        ("get_state", "state"),
        ("close", "close"),
    ],
)
def test_k98_a_hanging_env_is_caught_and_the_checker_goes_on(env: Any, call: str, point: str) -> None:
    broken = {r.name: r.detail for r in check_env(lambda: env(call), hang_seconds=0.1) if not r.passed}
    assert broken == {point: f"TimeoutError: {call} took longer than 0.1 s"}


def test_k88_the_checker_makes_all_calls_on_one_thread_that_is_not_its_own() -> None:
    threads: set[int] = set()

    class Watching(GoodAsync):
        def __init__(self) -> None:
            threads.add(threading.get_ident())

        async def step(self, action: str) -> Any:
            threads.add(threading.get_ident())
            return await super().step(action)

        async def expert_action(self) -> str:  # type: ignore[override]
            threads.add(threading.get_ident())
            return super().expert_action()

        async def close(self) -> None:  # type: ignore[override]
            threads.add(threading.get_ident())

    assert_env(Watching)
    assert len(threads) == 1
    assert threading.get_ident() not in threads


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
