"""Groups of scored episodes → samples with advantages."""

from __future__ import annotations

import numpy as np

from relax_gym.algorithm import Algorithm
from relax_gym.trajectory import to_samples, with_advantage
from relax_gym.types import Group, TrainingSample


def drop_reason(group: Group, algorithm: Algorithm) -> str | None:
    """Why a group is not worth training on, judged by its raw rewards; None when it is."""
    scored = group.rewards[~np.isnan(group.rewards)]
    if scored.size == 0:
        return "unscored"
    if algorithm.filter_zero_variance and np.ptp(scored) == 0:
        return "zero_variance"
    return None


def assign_credit(groups: list[Group], algorithm: Algorithm) -> list[TrainingSample]:
    """All samples of the batch; an episode's advantage stands at each of its trained tokens."""
    samples: list[TrainingSample] = []
    advantages: list[float] = []
    for group in groups:
        for trajectory, advantage in zip(group.trajectories, algorithm.advantages(group.rewards), strict=True):
            parts = to_samples(trajectory, group.group_id)
            samples += parts
            advantages += [float(advantage)] * len(parts)
    counts = np.array([sample.trained_tokens for sample in samples], dtype=np.int64)
    final = algorithm.batch_advantages(np.array(advantages, dtype=np.float64), counts)
    return [with_advantage(sample, value) for sample, value in zip(samples, final.tolist(), strict=True)]
