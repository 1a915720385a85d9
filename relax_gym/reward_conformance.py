"""Whether a reward keeps its contract; public through `relax_gym.testing`."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from relax_gym.conformance import Broken, CheckResult, attempt, same
from relax_gym.reward import GroupReward, Reward, is_group_reward
from relax_gym.types import Trajectory
from relax_gym.workers import awaited

Number = int | float | np.integer | np.floating


def check_reward(reward: Reward | GroupReward, trajectories: Sequence[Trajectory]) -> list[CheckResult]:
    """Check a reward on finished episodes: it gives a number or None, repeats it, changes nothing, in any thread.

    A reward of groups scores each episode as a group of its own, and all of them as one.
    """
    asked: Any = reward
    return [attempt(name, functools.partial(check, asked, trajectories)) for name, check in CHECKS.items()]


def _score(reward: Reward, trajectory: Trajectory) -> Any:
    try:
        if is_group_reward(reward):
            return _score_group(reward, [trajectory])[0]
        value = reward(trajectory)
        return asyncio.run(awaited(value)) if inspect.isawaitable(value) else value
    except Broken:
        raise
    except Exception as error:
        where = f"{trajectory.task.env_id} seed {trajectory.task.seed}"
        raise Broken(
            f"failed on episode {trajectory.episode_id} of {where}: {type(error).__name__}: {error}"
        ) from error


def _score_group(reward: GroupReward, trajectories: Sequence[Trajectory]) -> list[Any]:
    """A score for each episode; None for an exception in its place, which says why there is none."""
    value = reward.score_group(trajectories)
    scores = asyncio.run(awaited(value)) if inspect.isawaitable(value) else value
    if not isinstance(scores, Sequence) or len(scores) != len(trajectories):
        raise Broken(
            f"score_group gave {scores!r:.100} for {len(trajectories)} episodes; it must give one score for each"
        )
    return [None if isinstance(score, Exception) else score for score in scores]


def _reward_number(reward: Reward, trajectories: Sequence[Trajectory]) -> str:
    scores = [_score(reward, trajectory) for trajectory in trajectories]
    if is_group_reward(reward):
        scores = _score_group(reward, trajectories)
    for trajectory, score in zip(trajectories, scores, strict=True):
        values = score.values() if isinstance(score, Mapping) else score if isinstance(score, list | tuple) else [score]
        if not any(_is_number(value) for value in values):
            raise Broken(
                f"gave {score!r:.100} for episode {trajectory.episode_id}; it must give a number, a mapping of "
                "numbers, or None"
            )
    numbers = [float(score) for score in scores if isinstance(score, Number) and math.isfinite(score)]
    unscored = sum(not isinstance(score, Mapping | list | tuple) for score in scores) - len(numbers)
    spread = f", {min(numbers):g} to {max(numbers):g}" if numbers else ""
    return f"{len(scores) - unscored} scored, {unscored} unscored{spread}"


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, Number) and not isinstance(value, bool))


def _reward_repeats(reward: Reward, trajectories: Sequence[Trajectory]) -> str:
    for trajectory in trajectories:
        scores = [_score(reward, trajectory) for _ in range(2)]
        if not same(*scores):
            raise Broken(f"gave {scores[0]!r} and {scores[1]!r} for the same episode {trajectory.episode_id}")
    return "same episode, same score"


def _reward_reads_only(reward: Reward, trajectories: Sequence[Trajectory]) -> str:
    for trajectory in trajectories:
        before = repr(trajectory)
        _score(reward, trajectory)
        if repr(trajectory) != before:
            raise Broken(f"changed episode {trajectory.episode_id}; rewards must only read it")
    return "episodes unchanged"


def _reward_in_thread(reward: Reward, trajectories: Sequence[Trajectory]) -> str:
    with ThreadPoolExecutor(1) as pool:
        for trajectory in trajectories:
            here, there = _score(reward, trajectory), pool.submit(_score, reward, trajectory).result()
            if not same(here, there):
                raise Broken(f"gave {here!r} here and {there!r} in a worker thread for {trajectory.episode_id}")
    return "same score in a worker thread"


CHECKS = {
    "number": _reward_number,
    "repeat": _reward_repeats,
    "read-only": _reward_reads_only,
    "thread": _reward_in_thread,
}
