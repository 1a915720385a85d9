"""A finished episode → the same episode with its scores. Whatever a reward does, it gets exactly one entry."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import logging
import math
import traceback
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, SupportsFloat

import numpy as np

from relax_gym.batching import Batched
from relax_gym.errors import RelaxGymError, RewardError, suggestion
from relax_gym.isolation import isolated
from relax_gym.reward import GroupReward, Reward, is_group_reward
from relax_gym.types import Metrics, Trajectory
from relax_gym.waits import waiting
from relax_gym.workers import WorkerCancelled, WorkerThreads, WorkerTimeout, within

log = logging.getLogger("relax_gym")
LOGGED_FAILURES = 20
"""Most reasons why rewards fail that are logged: what a model wrote may stand in them, so that each is another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedReward:
    """One term of the sum: `weight` times what `reward` says (under `key`, in a mapping), reported as `name`."""

    name: str
    weight: float
    reward: Reward | GroupReward
    key: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """The weighted score, what of it each turn got, and the other numbers, or why there is no score."""

    score: float | None = None
    turns: tuple[float, ...] = ()
    parts: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""


def make_reward(factory: Callable[..., Any], kwargs: Mapping[str, Any]) -> Any:
    """What `factory` makes of its options, tried (`preflight`), isolated if it asks for that. Raises what it raises."""
    reward = factory(**kwargs)
    preflight = getattr(reward, "preflight", None)
    if callable(preflight):
        preflight()
    if callable(getattr(reward, "batch", None)):
        return Batched(reward)
    return isolated(reward)


async def score(
    trajectory: Trajectory,
    rewards: Sequence[WeightedReward],
    *,
    timeout: float,
    threads: WorkerThreads | None = None,
) -> Trajectory:
    """Ask every reward at once: sync ones in `threads`, async ones on the loop, each for at most `timeout` seconds.

    A reward that raises, runs out of time, or returns anything but a finite number gets None, never 0, and its reason
    stands in `reward_failures`. An episode that ended in an error is left unscored by all. Rewards of groups are left
    for `score_group`. Cancelling this call propagates; a reward that raises CancelledError of its own accord is one
    more failure.
    """
    async with _lent(threads) as lent:
        outcomes = await asyncio.gather(*(_ask(term, trajectory, timeout, lent) for term in rewards))
    bare = dataclasses.replace(trajectory, rewards={}, reward_failures={}, reward_parts={}, reward_turns={})
    return _scored(bare, {term.name: outcome for term, outcome in zip(rewards, outcomes, strict=True)})


async def score_group(
    trajectories: Sequence[Trajectory],
    rewards: Sequence[WeightedReward],
    *,
    timeout: float,
    threads: WorkerThreads | None = None,
) -> list[Trajectory]:
    """Ask the rewards of groups about episodes of one task that have their other scores; the rest is as in `score`."""
    terms = [term for term in rewards if is_group_reward(term.reward)]
    asked = [trajectory for trajectory in trajectories if trajectory.error is None]
    if not terms or not asked:
        return list(trajectories)
    async with _lent(threads) as lent:
        columns = await asyncio.gather(*(_ask_group(term, asked, timeout, lent) for term in terms))
    names = [term.name for term in terms]
    rows = (dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True))
    return [one if one.error else _scored(one, next(rows)) for one in trajectories]


@asynccontextmanager
async def _lent(threads: WorkerThreads | None) -> AsyncIterator[WorkerThreads]:
    """These threads, or some that end afterwards."""
    if threads is not None:
        yield threads
        return
    own = WorkerThreads("reward")
    try:
        yield own
    finally:
        own.close()


def _scored(trajectory: Trajectory, outcomes: Mapping[str, _Outcome]) -> Trajectory:
    """With these outcomes by the name of their reward; those of other rewards stay."""
    failures = {name: why for name, why in trajectory.reward_failures.items() if name not in outcomes}
    parts = {f"{name}/{key}": value for name, outcome in outcomes.items() for key, value in outcome.parts.items()}
    return dataclasses.replace(
        trajectory,
        rewards={**trajectory.rewards, **{name: outcome.score for name, outcome in outcomes.items()}},
        reward_failures=failures | {name: outcome.failure for name, outcome in outcomes.items() if outcome.failure},
        reward_parts={**trajectory.reward_parts, **parts},
        reward_turns={**trajectory.reward_turns, **{n: o.turns for n, o in outcomes.items() if o.turns}},
    )


class FailureLog:
    """Logs why rewards fail, each reason once."""

    def __init__(self) -> None:
        self._seen: set[tuple[int, str]] = set()

    def add(self, trajectory: Trajectory, level: int) -> str:
        """The last reason why a reward could not score this episode; "" where all could."""
        failure = ""
        for name, why in trajectory.reward_failures.items():
            failure = f"reward {name}: {why:.1000}"
            if (level, failure) not in self._seen and len(self._seen) < LOGGED_FAILURES:
                self._seen.add((level, failure))
                log.log(level, "%s, seed %d: %s", trajectory.task.env_id, trajectory.task.seed, failure)
        return failure


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
                await within(timeout, closing)
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
    if trajectory.error is not None:
        return _Outcome(failure=f"the episode ended in an error: {trajectory.error.message}")
    if is_group_reward(term.reward):
        return _Outcome(failure="it scores groups, and this episode was in none")
    reward: Any = term.reward
    try:
        with waiting(f"reward {term.name}", f"episode {trajectory.episode_id}") as limit:
            value = await _call(reward, trajectory, timeout, threads, limit)
        return _outcome(term, trajectory, value)
    except Exception as error:
        return _Outcome(failure=_reason(error, timeout))


async def _ask_group(
    term: WeightedReward, trajectories: Sequence[Trajectory], timeout: float, threads: WorkerThreads
) -> list[_Outcome]:
    """One outcome for each, whatever the reward does."""
    reward: Any = term.reward
    try:
        with waiting(f"reward {term.name}", f"group of episode {trajectories[0].episode_id}") as limit:
            values = await _call(reward.score_group, trajectories, timeout, threads, limit)
        if not isinstance(values, Sequence) or len(values) != len(trajectories):
            raise RewardError(
                f"score_group returned {values!r:.100} for {len(trajectories)} episodes; it must return a list with "
                "one score for each"
            )
    except Exception as error:
        return [_Outcome(failure=_reason(error, timeout))] * len(trajectories)
    outcomes = []
    for trajectory, value in zip(trajectories, values, strict=True):
        try:
            outcomes.append(_outcome(term, trajectory, value))
        except Exception as error:
            outcomes.append(_Outcome(failure=_reason(error, timeout)))
    return outcomes


async def _call(
    function: Callable[..., Any],
    argument: Any,
    timeout: float,
    threads: WorkerThreads,
    limit: Callable[[float], None],
) -> Any:
    if _is_async(function):
        value = function(argument)
    else:
        async with threads.lend() as worker:
            limit(timeout)
            value = await worker.call(function, argument, timeout=timeout)
    if not inspect.isawaitable(value):
        return value
    limit(timeout)
    try:
        return await within(timeout, value)
    except WorkerCancelled as error:
        raise RewardError("the reward cancelled itself") from error


def _outcome(term: WeightedReward, trajectory: Trajectory, value: Any) -> _Outcome:
    """What a reward returned, weighted. Raises what it returned as a reason, and RewardError for what is no score."""
    if isinstance(value, Exception):
        raise value
    value, parts = select(value, term.key)
    if not isinstance(value, list | tuple) and not (isinstance(value, np.ndarray) and value.ndim):
        return _Outcome(score=to_score(term.weight * to_score(value)), parts=parts)
    if len(value) != len(trajectory.turns):
        raise RewardError(
            f"returned {len(value)} numbers for {len(trajectory.turns)} turns; it must return one number, or a list "
            "with one for each turn"
        )
    turns = tuple(to_score(term.weight * to_score(one)) for one in value)
    return _Outcome(score=to_score(sum(turns)), turns=turns, parts=parts)


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _reason(error: Exception, timeout: float) -> str:
    if isinstance(error, WorkerTimeout):
        return f"took longer than {timeout:g} s (rollout.reward_timeout)"
    if isinstance(error, RelaxGymError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"
