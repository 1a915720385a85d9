"""The reward contract. A reward looks at a finished episode and gives one number, or None when it cannot."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol, runtime_checkable

from relax_gym.types import Trajectory


@runtime_checkable
class Reward(Protocol):
    """Any callable, sync or async. Sync rewards run in worker threads; raising means "unscored", never 0."""

    def __call__(self, trajectory: Trajectory, /) -> float | Awaitable[float | None] | None:
        """Score the episode; None (or NaN, or an exception) leaves it unscored."""
        ...
