"""The reward contract. A reward looks at a finished episode and gives one number, or None when it cannot."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any, Protocol, runtime_checkable

from relax_gym.types import Trajectory

Score = float | Mapping[str, Any] | None


@runtime_checkable
class Reward(Protocol):
    """Any callable, sync or async. Sync rewards run in worker threads; raising means "unscored", never 0.

    Optional methods: `metrics()` returns numbers since the last call, logged with each step as `reward/<name>/<key>`;
    `close()`, sync or async, is called once when the run is over.
    """

    def __call__(self, trajectory: Trajectory, /) -> Score | Awaitable[Score]:
        """Score the episode; None (or NaN, or an exception) leaves it unscored.

        A mapping holds several numbers: `key` of the `[[reward]]` section, or else the attribute `key` of the reward,
        says which one counts; the others are logged.
        """
        ...
