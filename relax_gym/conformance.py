"""Whether an env or a reward keeps its contract. Used by `relax-gym envs check`; exported by `relax_gym.testing`."""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import math
import pickle
import random
import string
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from relax_gym.env import Env, StepResult, check_reset, check_step
from relax_gym.registry import make
from relax_gym.reward import Reward
from relax_gym.types import Message, Trajectory

MAX_TURNS = 50
"""Turns after which the checker leaves an episode that has not ended."""

GARBAGE = (
    "",
    " \n\t",
    "\x00\x1b[0m\ud800",
    "🜁 ζ 漢字 " * 100,
    "<tool_call>{'name': ",
    '{"name": "no_such_tool", "parameters": []}',
    "</think>",
    "-1e999",
    "a" * 10_000,
)
"""Actions that no env may fail on."""

EnvSource = str | Env | Callable[..., Env]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """One point of the contract: whether it holds, and how or why not."""

    name: str
    passed: bool
    detail: str = ""


class _Broken(Exception):
    """A point of the contract that does not hold; the message says how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    action: str
    result: StepResult
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Episode:
    observation: list[Message]
    steps: list[_Step]
    seconds: float

    @property
    def observations(self) -> list[list[Message]]:
        return [self.observation, *(step.result.observation for step in self.steps)]

    def ended(self) -> bool:
        return bool(self.steps) and (self.steps[-1].result.terminated or self.steps[-1].result.truncated)


Policy = Callable[[int], str]
"""Turn → action."""


def check_env(
    env: EnvSource,
    *,
    seed: int = 0,
    episodes: int = 3,
    actions: Sequence[str] | None = None,
    max_seconds: float = 5.0,
    **kwargs: Any,
) -> list[CheckResult]:
    """Check every point of the env contract and say which hold. Must not be called inside a running event loop.

    Args:
        env: an id, a class or function that builds the env, or an env. Only what builds fresh envs is checked in full.
        seed: seed of the first episode; the others have the seeds that follow.
        episodes: episodes to play for each check, at least 1, of at most 50 turns.
        actions: what to say turn by turn; by default what the env's expert says, its random actions, and random text.
        max_seconds: most seconds that one `reset` or `step` may take.
        kwargs: arguments of the env's constructor.
    """
    if episodes < 1:
        raise ValueError(f"episodes is {episodes}; it must be at least 1")
    with asyncio.Runner() as runner:
        return _EnvCheck(runner, env, kwargs, range(seed, seed + episodes), actions, max_seconds).run()


def assert_env(env: EnvSource, **arguments: Any) -> None:
    """Raise AssertionError with all points of the contract that do not hold. Arguments as for `check_env`."""
    broken = [result for result in check_env(env, **arguments) if not result.passed]
    if broken:
        lines = "\n".join(f"- {result.name}: {result.detail}" for result in broken)
        raise AssertionError(f"{env if isinstance(env, str) else env!r} breaks the env contract:\n{lines}")


class _EnvCheck:
    def __init__(
        self,
        runner: asyncio.Runner,
        source: EnvSource,
        kwargs: Mapping[str, Any],
        seeds: range,
        actions: Sequence[str] | None,
        max_seconds: float,
    ) -> None:
        self.runner = runner
        self.source = source
        self.kwargs = kwargs
        self.seeds = seeds
        self.actions = actions
        self.max_seconds = max_seconds
        self.open: list[Env] = []
        self.played: list[_Episode] = []
        self.env: Any = None

    def run(self) -> list[CheckResult]:
        """All results; only the first failure when the env cannot even be played."""
        results: list[CheckResult] = []
        for name, check in [("build", self.build), ("play", self.play_all)]:
            results.append(_attempt(name, check))
            if not results[-1].passed:
                self.close_all()
                return results
        checks: dict[str, Callable[[], str]] = {
            "spaces": self.spaces,
            "tools": self.tools,
            "media": self.media,
            "expert_action": lambda: self.helper("expert_action"),
            "random_action": lambda: self.helper("random_action"),
            "seed": self.determinism,
            "state": self.resume,
            "garbage": self.garbage,
            "time": self.time,
            "close": self.close_all,
        }
        return results + [_attempt(name, check) for name, check in checks.items()]

    def build(self) -> str:
        self.env = self.fresh()
        is_async = inspect.iscoroutinefunction(self.env.step)
        return f"{type(self.env).__name__}, {'async' if is_async else 'sync'}"

    def fresh(self) -> Any:
        """A new env, or the one there is."""
        if isinstance(self.source, str):
            env: Any = make(self.source, **self.kwargs)
        elif hasattr(self.source, "step") and not isinstance(self.source, type):
            return self.source
        else:
            env = self.source(**self.kwargs)
        self.open.append(env)
        return env

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        return self.runner.run(_awaited(result)) if inspect.isawaitable(result) else result

    def play_all(self) -> str:
        self.played = [self.play(self.env, seed) for seed in self.seeds]
        for episode in self.played:
            self.unchanged(episode)
        ended = sum(episode.ended() for episode in self.played)
        turns = sum(len(episode.steps) for episode in self.played)
        return f"{len(self.played)} episodes, {turns} turns, {ended} ended"

    def play(self, env: Any, seed: int) -> _Episode:
        start = time.perf_counter()
        observation, _ = check_reset(self.call(env.reset, seed=seed))
        episode = _Episode(observation=observation, steps=[], seconds=time.perf_counter() - start)
        self.snapshots = [copy.deepcopy(observation)]
        self.go_on(env, episode, self.policy(env, seed), MAX_TURNS)
        return episode

    def go_on(self, env: Any, episode: _Episode, policy: Policy, turns: int) -> None:
        while len(episode.steps) < turns and not episode.ended():
            action = policy(len(episode.steps))
            start = time.perf_counter()
            result = check_step(self.call(env.step, action))
            episode.steps.append(_Step(action=action, result=result, seconds=time.perf_counter() - start))
            if not same(self.snapshots, episode.observations[:-1]):
                raise _Broken("a step changed messages that were returned before; return new ones every time")
            self.snapshots.append(copy.deepcopy(result.observation))
