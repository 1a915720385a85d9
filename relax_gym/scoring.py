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

from relax_gym.reward import Reward
from relax_gym.types import Trajectory
from relax_gym.workers import WorkerThreads


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedReward:
    """One term of the sum: `weight` times what `reward` says, reported as `name`."""

    name: str
    weight: float
    reward: Reward


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFailure:
    """Why a reward left an episode unscored. `traceback` is empty when it did not raise."""

    name: str
    reason: str
    traceback: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """The episode with its rewards, and what went wrong where an entry is None."""

    trajectory: Trajectory
    failures: tuple[RewardFailure, ...]


async def score(
    trajectory: Trajectory, rewards: Sequence[WeightedReward], *, timeout: float, threads: WorkerThreads
) -> Scored:
    """Ask every reward, all at once: sync ones in `threads`, async ones on the loop, each for at most `timeout` seconds.

    A reward that raises, runs out of time, or returns anything but a finite number is a failure: its entry is None,
    never 0. An episode that ended in an error is left unscored by all. Only cancelling this call cancels it; a reward
    that raises CancelledError of its own accord is one more failure.
    """
    if trajectory.error is not None:
        reason = f"the episode ended in an error: {trajectory.error.message}"
        outcomes: list[float | RewardFailure] = [RewardFailure(name=term.name, reason=reason) for term in rewards]
    else:
        outcomes = await asyncio.gather(*(_ask(term, trajectory, timeout, threads) for term in rewards))
    scores = {
        term.name: None if isinstance(outcome, RewardFailure) else term.weight * outcome
        for term, outcome in zip(rewards, outcomes, strict=True)
    }
    failures = tuple(outcome for outcome in outcomes if isinstance(outcome, RewardFailure))
    return Scored(trajectory=dataclasses.replace(trajectory, rewards=scores), failures=failures)


def to_score(value: Any) -> float:
    """What a reward returned, as a finite float. Raises ValueError saying what it was and what is allowed."""
    if isinstance(value, dict):
        raise ValueError(f"returned a dict with keys {list(value)}; a reward is one number: return one of the values")
    if not isinstance(value, SupportsFloat):
        raise ValueError(f"returned {value!r:.100}; a reward is one finite number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"returned {number}; a reward is one finite number")
    return number


async def _ask(
    term: WeightedReward, trajectory: Trajectory, timeout: float, threads: WorkerThreads
) -> float | RewardFailure:
    task = asyncio.create_task(_call(term.reward, trajectory, timeout, threads))
    try:
        return to_score(await asyncio.shield(task))
    except asyncio.CancelledError as error:
        if not task.done() or not task.cancelled():
            task.cancel()
            raise
        return _failure(term, "it cancelled itself", error)
    except TimeoutError as error:
        return _failure(term, str(error) or f"it took longer than {timeout:g} s (rollout.reward_timeout)", error)
    except ValueError as error:
        return _failure(term, str(error), error)
    except Exception as error:
        return _failure(term, f"{type(error).__name__}: {error}", error)
