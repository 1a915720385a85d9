"""CISPO: clips the importance weight, so that no token loses its gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from relax_gym.algorithm import Algorithm, FloatArray, TrainedTokens
from relax_gym_trainers.functional import cispo_loss, group_normalise

if TYPE_CHECKING:
    from torch import Tensor


class CISPO(Algorithm):
    """Clipped IS-weight Policy Optimization (MiniMax 2025, arXiv:2506.13585).

    GRPO's advantages; L = −sg(clip(r, 1 − ε_low, 1 + ε_high)) A ℓ; mean over all tokens. The paper sets no lower bound
    (clip_low = 1 is none: a ratio is never negative) and does not print ε_high.
    """

    clip_low: float = Field(1.0, gt=0, le=1, description="a token's weight is at least 1 - clip_low")
    clip_high: float = Field(4.0, gt=0, description="and at most 1 + clip_high")

    def advantages(self, rewards: FloatArray) -> FloatArray:
        """Group-normalised rewards, [G] → [G]."""
        return group_normalise(rewards)

    def token_loss(self, tokens: TrainedTokens) -> Tensor:
        """The weighted log-likelihood, [N]."""
        return cispo_loss(
            tokens.logprobs, tokens.ratio, tokens.advantages, clip_low=self.clip_low, clip_high=self.clip_high
        )
