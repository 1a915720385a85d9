"""SFT on the policy's own best samples (rejection sampling, expert iteration)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from relax_gym.algorithm import Algorithm, FloatArray, TrainedTokens
from relax_gym_trainers.functional import reinforce_loss

if TYPE_CHECKING:
    from torch import Tensor


class SFT(Algorithm):
    """Supervised fine-tuning on sampled episodes (RFT: Yuan et al. 2023, arXiv:2308.01825).

    A = 1 for the episodes kept, 0 for the rest, which leave the batch: the loss is the mean of −ℓ over the tokens kept.
    Kept are, of those that reach `min_reward`, the best of each group (`keep = "best"`, ties included) or all. Groups
    without contrast are kept whole unless `filter_zero_variance` drops them. SFT on an env's own expert is `[warmup]`.
    """

    keep: Literal["best", "all"] = Field("best", description="the episodes with a group's highest reward, or all")
    min_reward: float | None = Field(None, description="episodes with less are never kept; off")

    @model_validator(mode="after")
    def _keep_episodes(self) -> Self:
        if self.credit == "turn":
            raise ValueError("credit = 'turn' does not go with sft, which keeps whole episodes; leave it out")
        if self.kl_reward_coef:
            raise ValueError(
                f"kl_reward_coef = {self.kl_reward_coef} does not go with sft, which has no reward in its loss to "
                "subtract it from; set kl_coef for a KL loss"
            )
        return self

    @property
    def is_policy_gradient(self) -> bool:
        """What is imitated is good whoever said it."""
        return False

    @property
    def leaves_out_flat(self) -> bool:
        """An episode that is not kept is no part of the mean."""
        return True

    @property
    def needs_group(self) -> bool:
        """An episode is good or bad by itself."""
        return False

    def advantages(self, rewards: FloatArray) -> FloatArray:
        """1 for what is kept, 0 for the rest and for what could not be scored, [G] → [G]."""
        kept = ~np.isnan(rewards)
        if self.keep == "best" and kept.any():
            kept &= rewards == rewards[kept].max()
        if self.min_reward is not None:
            kept &= rewards >= self.min_reward
        return kept.astype(np.float64)

    def token_loss(self, tokens: TrainedTokens) -> Tensor:
        """Negative log-likelihood, [N]."""
        return reinforce_loss(tokens.logprobs, tokens.advantages)
