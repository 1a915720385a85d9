"""The algorithm contract: group → advantages; log-probs and advantages of the trained tokens → loss per token."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    from torch import Tensor

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedTokens:
    """The trained tokens of some samples, flat. Tokens with loss mask 0 are never in here, so they cannot leak.

    All tensors are float32 (or float64) of shape [N] but `sample`, int64 [N] in [0, num_samples): which sample a token
    belongs to. A sample is never split between two of these. Log-probs are at the sampling temperature.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    sample: Tensor
    num_samples: int

    @property
    def ratio(self) -> Tensor:
        """π/π_old for each token, [N]."""
        return (self.logprobs - self.old_logprobs).exp()

    def sample_mean(self, values: Tensor) -> Tensor:
        """Mean of `values` [N] over the tokens of each sample, broadcast back to tokens, [N]."""
        sums = values.new_zeros(self.num_samples).index_add(0, self.sample, values)
        counts = values.new_zeros(self.num_samples).index_add(0, self.sample, values.new_ones(len(values)))
        return (sums / counts.clamp(min=1))[self.sample]


class Algorithm(BaseModel):
    """Options of an algorithm (its fields, checked when the config is read) and its two functions.

    Subclass, add fields, implement `advantages` and `token_loss`, return it from the `register_algorithms` hook.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = "token-mean"
    token_sum_norm: float | None = Field(None, gt=0, description="the constant of seq-mean-token-sum-norm")
    old_logprobs: Literal["rollout", "recompute"] = Field(
        "rollout",
        description="policy the ratio is taken against: the sampler's numbers, or the learner's own before the update",
    )
    kl_coef: float = Field(
        0.0, ge=0, description="weight of the KL loss to the frozen initial model; 0 keeps no such model"
    )
    kl_estimator: Literal["k2", "k3"] = "k3"
    entropy_coef: float = Field(0.0, ge=0, description="weight of the entropy bonus over the full vocabulary")
    filter_zero_variance: bool = Field(
        False, description="drop groups whose raw rewards are all equal and sample another in their place"
    )

    def model_post_init(self, context: Any) -> None:
        """Check options that depend on each other."""
        if (self.aggregation == "seq-mean-token-sum-norm") != (self.token_sum_norm is not None):
            raise ValueError(
                "aggregation 'seq-mean-token-sum-norm' and token_sum_norm go together; give both (the norm is usually "
                "the longest completion in tokens) or neither"
            )

    @property
    def needs_group(self) -> bool:
        """Whether a group of one episode gives no learning signal."""
        return True

    @abstractmethod
    def advantages(self, rewards: FloatArray) -> FloatArray:
        """Raw rewards of one group [G] → one advantage for each episode [G].

        NaN marks an episode that could not be scored: leave it out of every statistic and return 0 for it.
        """

    def batch_advantages(self, advantages: FloatArray, token_counts: NDArray[np.int64]) -> FloatArray:
        """Advantages [B] of all samples of the global batch, given their `token_counts` [B]; identity by default."""
        return advantages

    @abstractmethod
    def token_loss(self, tokens: TrainedTokens) -> Tensor:
        """Loss of each trained token, [N], differentiable in `tokens.logprobs`."""
