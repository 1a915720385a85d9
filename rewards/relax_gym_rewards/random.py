"""Noise: a number that has nothing to do with the episode."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from relax_gym.errors import RewardError
from relax_gym.types import Trajectory
from relax_gym_rewards._answers import number_option


@dataclass(frozen=True, slots=True, kw_only=True)
class Random:
    """Uniform from `low` to `high`, the same each time for an episode and `seed`: a baseline that teaches nothing."""

    seed: int = 0
    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        number_option("random", "seed", self.seed, -(2**63), 2**63, integer=True)
        number_option("random", "low", self.low, -1e9, 1e9)
        number_option("random", "high", self.high, -1e9, 1e9)
        if not self.low < self.high:
            raise RewardError(f"random: low is {self.low} and high {self.high}; low must be below high")

    def __call__(self, trajectory: Trajectory, /) -> float:
        task = trajectory.task
        key = f"{self.seed}\n{task.env_id}\n{task.seed}\n{trajectory.episode_id}"
        drawn = int.from_bytes(hashlib.blake2b(key.encode("utf-8", "replace"), digest_size=8).digest()) >> 11
        return self.low + (self.high - self.low) * drawn / 2**53
