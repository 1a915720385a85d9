"""SAPO: a soft gate instead of a clip."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from relax_gym.algorithm import Aggregation, Algorithm, FloatArray, TrainedTokens
from relax_gym_trainers.functional import group_normalise, sapo_loss

if TYPE_CHECKING:
    from torch import Tensor


class SAPO(Algorithm):
    """Soft Adaptive Policy Optimization (Gao et al. 2025, arXiv:2511.20347).

    GRPO's advantages; L = −(4/τ) σ(τ(r − 1)) A with τ = 1 for A > 0 and 1.05 otherwise; mean over samples of the mean
    over tokens.
    """

    aggregation: Aggregation = "seq-mean-token-mean"
    tau_positive: float = Field(1.0, gt=0, description="how fast the gate closes where A > 0")
    tau_negative: float = Field(1.05, gt=0, description="and where A <= 0")

    def advantages(self, rewards: FloatArray) -> FloatArray:
        """Group-normalised rewards, [G] → [G]."""
        return group_normalise(rewards)

    def token_loss(self, tokens: TrainedTokens) -> Tensor:
        """The gated loss, [N]."""
        return sapo_loss(
            tokens.ratio, tokens.advantages, tau_positive=self.tau_positive, tau_negative=self.tau_negative
        )
