"""Environments that fail in every way an env can, for the tests of whoever must survive them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from typing import Any

import relax_gym
from relax_gym import Env, StepResult, user

closes: Counter[str] = Counter()
release = threading.Event()


class Faulty(Env):
    """Ends after `turns` steps with reward 1; `fault` names what goes wrong, and where."""

    def __init__(self, fault: str = "", turns: int = 2, name: str = "") -> None:
        if fault == "constructor":
            raise ValueError("no licence")
        self.fault, self.turns, self.name, self.count = fault, turns, name or fault, 0
        self.threads: set[int] = set()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.threads.add(threading.get_ident())
        if self.fault == "reset":
            raise ValueError("reset is broken")
        if self.fault == "reset nonsense":
            return "hello"
        return user("say something"), {}

    def step(self, action: str) -> Any:
        self.count += 1
        self.threads.add(threading.get_ident())
        if self.fault == "step":
            raise KeyError("lost item")
        if self.fault == "hang":
            release.wait(20)
        if self.fault == "exit":
            raise SystemExit(3)
        if self.fault == "role":
            return StepResult([{"role": "robot", "content": "x"}], 0.0, False, False, {})
        if self.fault == "reward type":
            return StepResult([], {"score": 1}, True, False, {})  # type: ignore[arg-type]
        if self.fault == "nan":
            return StepResult([], float("nan"), True, False, {})
        if self.fault == "slow":
            time.sleep(0.3)
        done = self.count >= self.turns
        return StepResult([] if done else user("go on"), float(done), done, False, {"correct": done})

    def close(self) -> None:
        closes[self.name] += 1
        if self.fault == "close":
            raise OSError("socket is gone")


class FaultyAsync(Faulty):
    """The same with coroutines."""

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().reset(seed=seed, options=options)

    async def step(self, action: str) -> Any:
        if self.fault == "hang":
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        return super().step(action)

    async def close(self) -> None:  # type: ignore[override]
        super().close()


class OneThread(Faulty):
    """Wants all its calls on one thread."""

    thread_affinity = True

    def step(self, action: str) -> Any:
        result = super().step(action)
        result.info["threads"] = len(self.threads)
        return result


if "test/Faulty-v0" not in relax_gym.list():
    relax_gym.register("test/Faulty-v0", Faulty)
    relax_gym.register("test/FaultyAsync-v0", FaultyAsync)
    relax_gym.register("test/OneThread-v0", OneThread)
