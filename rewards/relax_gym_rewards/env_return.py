"""The env's own reward."""

from __future__ import annotations

from dataclasses import dataclass

from relax_gym.types import Trajectory


@dataclass(frozen=True, slots=True)
class EnvReturn:
    """Sum of the rewards the env gave; NaN (unscored) when one of them is."""

    def __call__(self, trajectory: Trajectory, /) -> float:
        return trajectory.env_return
