"""REINFORCE++-baseline: the group's mean as baseline, the whole batch's deviation as scale."""

from __future__ import annotations

from typing import Literal

from relax_gym.algorithm import FloatArray
from relax_gym_trainers.algorithms.reinforce_pp import ReinforcePP
from relax_gym_trainers.functional import group_normalise


class ReinforcePPBaseline(ReinforcePP):
    """REINFORCE++ with baseline (Hu et al. 2025, arXiv:2501.03262).

    A = R − mean R over the group, whitened over all trained tokens of the global batch; PPO's clipped loss; the paper's
    KL is a k2 loss: set kl_coef.
    """

    kl_estimator: Literal["k2", "k3"] = "k2"

    @property
    def needs_group(self) -> bool:
        """The baseline is the group's mean."""
        return True

    def advantages(self, rewards: FloatArray) -> FloatArray:
        """Reward minus the group's mean, [G] → [G]."""
        return group_normalise(rewards, scale="none")
