"""Policy gradient on ranks: how much better an episode was does not count, only that it was."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from relax_gym import Algorithm, TrainedTokens
from relax_gym.algorithm import FloatArray

if TYPE_CHECKING:
    from torch import Tensor


class Rank(Algorithm):
    """Advantage: the share of the group that an episode beats minus the share that beats it, times `scale`."""

    scale: float = 1.0

    def advantages(self, rewards: FloatArray) -> FloatArray:
        """[G] → [G]; NaN (unscored) neither beats nor is beaten."""
        beats = rewards[:, None] > rewards[None, :]
        scored = max(1, int(np.sum(~np.isnan(rewards))) - 1)
        return self.scale * (beats.sum(axis=1) - beats.sum(axis=0)) / scored

    def token_loss(self, tokens: TrainedTokens) -> Tensor:
        """Policy gradient with the ratio to the sampling policy, [N]."""
        return -tokens.advantages * tokens.ratio
