"""What answer-checking rewards look at: the last action, and the reference the env left in `info`."""

from __future__ import annotations

from typing import Any

from relax_gym.errors import RewardError
from relax_gym.types import Trajectory


def final_action(trajectory: Trajectory) -> str:
    """What the model said last. Raises RewardError when it said nothing."""
    if not trajectory.turns:
        raise RewardError(f"episode {trajectory.episode_id} has no turns, so no answer ({trajectory.stop_reason})")
    return trajectory.turns[-1].action


def reference(trajectory: Trajectory, field: str) -> Any:
    """`trajectory.info[field]`. Raises RewardError naming the field and the keys there are."""
    if trajectory.info.get(field) is None:
        keys = ", ".join(map(repr, trajectory.info)) or "none"
        raise RewardError(f"env {trajectory.task.env_id} left no {field!r} in info to compare with; its keys: {keys}")
    return trajectory.info[field]
