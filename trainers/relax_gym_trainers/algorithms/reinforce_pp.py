"""REINFORCE++: no group, no critic; advantages whitened over the whole batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from relax_gym.algorithm import Algorithm, FloatArray, TrainedTokens
from relax_gym_trainers.functional import ppo_clip_loss, whiten

if TYPE_CHECKING:
    from torch import Tensor


class ReinforcePP(Algorithm):
    """REINFORCE++ (Hu et al. 2025, arXiv:2501.03262).

    A_t = R − kl_reward_coef · Σ_{s ≥ t} k1_s, whitened over all trained tokens of the global batch; PPO's clipped loss;
    mean over all tokens.
    """

    clip_low: float = Field(0.2, gt=0, lt=1, description="the ratio is not pushed below 1 - clip_low")
    clip_high: float = Field(0.2, gt=0, description="nor above 1 + clip_high")

    @property
    def needs_group(self) -> bool:
        """The baseline is the whole batch."""
        return False

    def advantages(self, rewards: FloatArray) -> FloatArray:
        """The rewards themselves, [G] → [G]."""
        return np.nan_to_num(rewards, nan=0.0)

    def batch_advantages(self, advantages: FloatArray) -> FloatArray:
        """Whitened over the trained tokens of the global batch, [N] → [N]."""
        return whiten(advantages)

    def token_loss(self, tokens: TrainedTokens) -> Tensor:
        """PPO's clipped loss, [N]."""
        return ppo_clip_loss(tokens.ratio, tokens.advantages, clip_low=self.clip_low, clip_high=self.clip_high)
