"""Rewards few words."""

from relax_gym import Trajectory


class Brief:
    """1 when no answer is longer than `characters`, else 0; None when there is no answer."""

    def __init__(self, characters: int = 2) -> None:
        self.characters = characters

    def __call__(self, trajectory: Trajectory) -> float | None:
        """Score a finished episode."""
        if not trajectory.turns:
            return None
        return float(all(len(turn.action) <= self.characters for turn in trajectory.turns))
