"""GRPO: group-normalised rewards, PPO's clipped loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from relax_gym.algorithm import Aggregation, Algorithm, FloatArray, TrainedTokens
from relax_gym_trainers.functional import group_normalise, ppo_clip_loss

if TYPE_CHECKING:
    from torch import Tensor


class GRPO(Algorithm):
    """Group Relative Policy Optimization (Shao et al. 2024, arXiv:2402.03300).

    A_i = (R_i − mean R) / (std R + 1e-6) over the group; L = max(−rA, −clip(r, 1 − ε_low, 1 + ε_high)A) for each token;
    mean over samples of the mean over tokens. The paper adds a k3 loss of weight 0.04: set kl_coef.
    """

    aggregation: Aggregation = "seq-mean-token-mean"
    clip_low: float = Field(0.2, gt=0, lt=1, description="the ratio is not pushed below 1 - clip_low")
    clip_high: float = Field(0.2, gt=0, description="nor above 1 + clip_high")
    dual_clip: float | None = Field(None, gt=1, description="most loss of a token with A < 0, in units of |A|; off")
    scale: Literal["std", "none"] = Field("std", description="divide by the group's standard deviation, or do not")

    def advantages(self, rewards: FloatArray) -> FloatArray:
        """Group-normalised rewards, [G] → [G]."""
        return group_normalise(rewards, scale=self.scale)

    def token_loss(self, tokens: TrainedTokens) -> Tensor:
        """PPO's clipped loss, [N]."""
        return ppo_clip_loss(
            tokens.ratio,
            tokens.advantages,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
        )
