"""A finished episode → the same episode with its scores. Whatever a reward does, it gets exactly one entry."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import math
import traceback
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, SupportsFloat

from relax_gym.errors import RelaxGymError, RewardError
from relax_gym.reward import Reward
from relax_gym.types import Trajectory
from relax_gym.workers import WorkerThreads, WorkerTimeout


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedReward:
    """One term of the sum: `weight` times what `reward` says, reported as `name`."""

    name: str
    weight: float
    reward: Reward


async def score(
    trajectory: Trajectory,
    rewards: Sequence[WeightedReward],
    *,
    timeout: float,
    threads: WorkerThreads | None = None,
) -> Trajectory:
    """Ask every reward at once: sync ones in `threads`, async ones on the loop, each for at most `timeout` seconds.

    A reward that raises, runs out of time, or returns anything but a finite number gets None, never 0, and its reason
    stands in `reward_failures`. An episode that ended in an error is left unscored by all. Cancelling this call
    propagates; a reward that raises CancelledError of its own accord is one more failure.
    """
    if trajectory.error is not None:
        reason = f"the episode ended in an error: {trajectory.error.message}"
        outcomes: list[float | str] = [reason for _ in rewards]
    else:
        lent = threads or WorkerThreads("reward")
        try:
            outcomes = await asyncio.gather(*(_ask(term, trajectory, timeout, lent) for term in rewards))
        finally:
            if threads is None:
                lent.close()
    by_name = dict(zip((term.name for term in rewards), outcomes, strict=True))
    return dataclasses.replace(
        trajectory,
        rewards={name: None if isinstance(outcome, str) else outcome for name, outcome in by_name.items()},
        reward_failures={name: outcome for name, outcome in by_name.items() if isinstance(outcome, str)},
    )


def to_score(value: Any) -> float:
    """What a reward returned, as a finite float. Raises RewardError saying what it was and what is allowed."""
    if isinstance(value, dict):
        raise RewardError(f"returned a dict with keys {list(value)}; a reward is one number: return one of the values")
    if not isinstance(value, SupportsFloat):
        raise RewardError(f"returned {value!r:.100}; a reward is one finite number")
    number = float(value)
    if not math.isfinite(number):
        raise RewardError(f"returned {number}; a reward is one finite number")
    return number


async def _ask(term: WeightedReward, trajectory: Trajectory, timeout: float, threads: WorkerThreads) -> float | str:
    """The weighted score, or why there is none."""
    try:
        if _is_async(term.reward):
            value: Any = term.reward(trajectory)
        else:
            value = await threads.call(term.reward, trajectory, timeout=timeout)
        if inspect.isawaitable(value):
            value = await _limited(value, timeout)
        return to_score(term.weight * to_score(value))
    except Exception as error:
        return _reason(error, timeout)


async def _limited(awaitable: Awaitable[Any], timeout: float) -> Any:
    """Await with a limit that holds even for a coroutine that ignores its cancellation."""
    task = asyncio.ensure_future(awaitable)
    try:
        await asyncio.wait({task}, timeout=timeout)
        if not task.done():
            raise WorkerTimeout
    finally:
        if not task.done():
            task.cancel()
            task.add_done_callback(lambda late: late.cancelled() or late.exception())
    if task.cancelled():
        raise RewardError("the reward cancelled itself")
    return task.result()


def _is_async(reward: Reward) -> bool:
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(getattr(reward, "__call__", None))  # noqa: B004


def _reason(error: Exception, timeout: float) -> str:
    if isinstance(error, WorkerTimeout):
        return f"took longer than {timeout:g} s (rollout.reward_timeout)"
    if isinstance(error, RelaxGymError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"
