"""GSPO: one importance ratio for the whole sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from relax_gym.algorithm import TrainedTokens
from relax_gym_trainers.algorithms.grpo import GRPO
from relax_gym_trainers.functional import ppo_clip_loss

if TYPE_CHECKING:
    from torch import Tensor


class GSPO(GRPO):
    """Group Sequence Policy Optimization (Zheng et al. 2025, arXiv:2507.18071).

    GRPO's advantages; s_i = exp(mean over the tokens of sample i of (ℓ − ℓ_old)), the same for each of its tokens;
    L = max(−sA, −clip(s, 1 − ε_low, 1 + ε_high)A) with the paper's narrow ε 3e-4 / 4e-4.
    """

    clip_low: float = Field(3e-4, gt=0, lt=1, description="the ratio is not pushed below 1 - clip_low")
    clip_high: float = Field(4e-4, gt=0, description="nor above 1 + clip_high")

    def token_loss(self, tokens: TrainedTokens) -> Tensor:
        """The sequence's clipped loss at each of its tokens, [N]."""
        return ppo_clip_loss(
            self.ratio(tokens),
            tokens.advantages,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
        )

    def ratio(self, tokens: TrainedTokens) -> Tensor:
        """s_i at each token of sample i, [N]."""
        return tokens.sequence_ratio
