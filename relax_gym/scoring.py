"""A finished episode → the same episode with its scores. Whatever a reward does, it gets exactly one entry."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import logging
import math
import traceback
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, SupportsFloat

from relax_gym.errors import RelaxGymError, RewardError, suggestion
from relax_gym.reward import Reward
from relax_gym.types import Metrics, Trajectory
from relax_gym.waits import waiting
from relax_gym.workers import WorkerThreads, WorkerTimeout

log = logging.getLogger("relax_gym")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedReward:
    """One term of the sum: `weight` times what `reward` says (under `key`, in a mapping), reported as `name`."""

    name: str
    weight: float
    reward: Reward
    key: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """The weighted score and the other numbers, or why there is no score."""

    score: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""


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
        outcomes = [_Outcome(failure=reason) for _ in rewards]
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
        rewards={name: outcome.score for name, outcome in by_name.items()},
        reward_failures={name: outcome.failure for name, outcome in by_name.items() if outcome.failure},
        reward_parts={
            f"{name}/{key}": value for name, outcome in by_name.items() for key, value in outcome.parts.items()
        },
    )


def reward_metrics(rewards: Sequence[WeightedReward]) -> Metrics:
    """What rewards with `metrics()` count, as `reward/<name>/<key>`. One that raises is logged and left out."""
    out: Metrics = {}
    for term in rewards:
        metrics = getattr(term.reward, "metrics", None)
        if not callable(metrics):
            continue
        try:
            out |= {f"reward/{term.name}/{key}": float(value) for key, value in metrics().items()}
        except Exception:
            log.warning("reward %s: metrics() failed", term.name, exc_info=True)
    return out


async def close_rewards(
    rewards: Sequence[WeightedReward], *, timeout: float, threads: WorkerThreads | None = None
) -> None:
    """Close the rewards that have `close()`, sync or async. One that raises or hangs is logged: the run is over."""
    lent = threads or WorkerThreads("reward")
    for term in rewards:
        close = getattr(term.reward, "close", None)
        if not callable(close):
            continue
        try:
            closing = await lent.call(close, timeout=timeout)
            if inspect.isawaitable(closing):
                await _limited(closing, timeout)
        except Exception:
            log.warning("reward %s: close() failed", term.name, exc_info=True)
    if threads is None:
        lent.close()


def to_score(value: Any) -> float:
    """What a reward returned, as a finite float. Raises RewardError saying what it was and what is allowed."""
    if isinstance(value, Mapping):
        raise RewardError(
            f"returned a mapping with keys {list(value)}; a reward is one number: set key = … in its [[reward]] to the "
            "one that counts"
        )
    if not isinstance(value, SupportsFloat):
        raise RewardError(f"returned {value!r:.100}; a reward is one finite number")
    number = float(value)
    if not math.isfinite(number):
        raise RewardError(f"returned {number}; a reward is one finite number")
    return number


def select(value: Any, key: str | None) -> tuple[Any, dict[str, float]]:
    """What counts of a reward's answer, and the other finite numbers in it. Raises RewardError without `key` in it."""
    if key is None or value is None:
        return value, {}
    if not isinstance(value, Mapping):
        raise RewardError(f"returned {value!r:.100}; with key = {key!r} in its [[reward]] it must return a mapping")
    if key not in value:
        raise RewardError(f"returned nothing under key = {key!r}{suggestion(key, map(str, value))}")
    parts = {str(name): float(v) for name, v in value.items() if name != key and isinstance(v, Real)}
    return value[key], {name: number for name, number in parts.items() if math.isfinite(number)}


async def _ask(term: WeightedReward, trajectory: Trajectory, timeout: float, threads: WorkerThreads) -> _Outcome:
    try:
        with waiting(f"reward {term.name}", f"episode {trajectory.episode_id}", timeout):
            if _is_async(term.reward):
                value: Any = term.reward(trajectory)
            else:
                value = await threads.call(term.reward, trajectory, timeout=timeout)
            if inspect.isawaitable(value):
                value = await _limited(value, timeout)
        value, parts = select(value, term.key)
        return _Outcome(score=to_score(term.weight * to_score(value)), parts=parts)
    except Exception as error:
        return _Outcome(failure=_reason(error, timeout))


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
