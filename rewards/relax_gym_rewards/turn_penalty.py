"""Shorter episodes are better."""

from __future__ import annotations

import math
from dataclasses import dataclass

from relax_gym.errors import RewardError
from relax_gym.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPenalty:
    """`-per_turn` for each turn beyond the first."""

    per_turn: float = 0.01

    def __post_init__(self) -> None:
        if not 0 <= self.per_turn < math.inf:
            raise RewardError(f"turn_penalty: per_turn is {self.per_turn}; it must be finite and 0 or more")

    def __call__(self, trajectory: Trajectory, /) -> float:
        return -self.per_turn * max(0, len(trajectory.turns) - 1)
