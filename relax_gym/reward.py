"""The reward contract. A reward looks at a finished episode and gives one number, or None when it cannot."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Protocol, TypeGuard, runtime_checkable

from relax_gym.types import Trajectory

Score = float | Sequence[float] | Mapping[str, Any] | None
"""A number, a number for each turn, several by name, or None for "cannot say"."""


@runtime_checkable
class Reward(Protocol):
    """Any callable, sync or async. Sync rewards run in worker threads; raising means "unscored", never 0.

    Optional methods: `metrics()` returns numbers since the last call, logged with each step as `reward/<name>/<key>`;
    `preflight()` is called before the model is loaded and raises when the reward cannot work here; `close()`, sync or
    async, is called once when the run is over. With `isolated = True` all calls are made in processes that can be
    killed, within `seconds` and `memory` (MiB) if it has these attributes (`relax_gym.isolation`).
    """

    def __call__(self, trajectory: Trajectory, /) -> Score | Awaitable[Score]:
        """Score the episode; None (or NaN, or an exception) leaves it unscored.

        A list holds a number for each turn: the score is their sum, and `algorithm.credit = "turn"` gives each turn its
        own. A mapping holds several numbers: `key` of the `[[reward]]` section, or else the attribute `key` of the
        reward, says which one counts; the others are logged.
        """
        ...


@runtime_checkable
class GroupReward(Protocol):
    """Scores the episodes of a group beside each other, once the last has ended. `Reward`'s optional methods apply."""

    def score_group(
        self, trajectories: Sequence[Trajectory], /
    ) -> Sequence[Score | Exception] | Awaitable[Sequence[Score | Exception]]:
        """A score, as a `Reward` returns it, for each episode, in order; an exception says why one has none.

        The episodes are those of one task; those that ended in an error are not among them. When this raises, all of
        them are unscored.
        """
        ...


def is_group_reward(reward: Reward | GroupReward) -> TypeGuard[GroupReward]:
    """Whether it is asked about groups. One with both methods is."""
    return callable(getattr(reward, "score_group", None))
