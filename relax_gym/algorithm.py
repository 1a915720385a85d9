"""The algorithm contract: group → advantages; log-probs and advantages of the trained tokens → loss per token."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator

from relax_gym.errors import ConfigError, PluginError
from relax_gym.registry import load
from relax_gym.section import Section
from relax_gym.types import Group

if TYPE_CHECKING:
    from torch import Tensor

    from relax_gym.config import RunConfig
    from relax_gym.teacher import Distillation

FloatArray = NDArray[np.float64]
Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]

MAX_LOG_RATIO = 20.0
"""Beyond this |log-ratio| exp says nothing more and only risks an overflow, whose gradient 0 · ∞ would be NaN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedTokens:
    """The trained tokens of some samples, flat. Tokens with loss mask 0 are never in here, so they cannot leak.

    All tensors are float32 (or float64) of shape [N] but `sample`, int64 [N] in [0, num_samples): which sample a token
    belongs to. A sample is never split between two of these. Log-probs are at the sampling temperature.
    `rollout_logprobs` are those of the policy version that sampled each token, however stale it is.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    sample: Tensor
    num_samples: int

    @property
    def ratio(self) -> Tensor:
        """π/π_old for each token, [N]; its log is cut at ±MAX_LOG_RATIO, like that of `sequence_ratio`."""
        return _bounded_exp(self.logprobs - self.old_logprobs)

    @property
    def sequence_ratio(self) -> Tensor:
        """exp(mean over the sample's tokens of log π/π_old) at each of its tokens, [N]."""
        return _bounded_exp(self.sample_mean(self.logprobs - self.old_logprobs))

    def sample_mean(self, values: Tensor) -> Tensor:
        """Mean of `values` [N] over the tokens of each sample, broadcast back to tokens, [N]."""
        sums = values.new_zeros(self.num_samples).index_add(0, self.sample, values)
        counts = values.new_zeros(self.num_samples).index_add(0, self.sample, values.new_ones(len(values)))
        return (sums / counts.clamp(min=1))[self.sample]


def _bounded_exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


class Algorithm(Section):
    """Options of an algorithm (its fields, checked when the config is read) and its two functions.

    Subclass, add fields, implement `advantages` and `token_loss`, return it from the `register_algorithms` hook. The
    fields here are the parts that go with every algorithm; learners and the loop see to them.
    """

    aggregation: Aggregation = Field("token-mean", description="how the losses of tokens become one number")
    token_sum_norm: float | None = Field(None, gt=0, description="the constant of seq-mean-token-sum-norm")

    old_logprobs: Literal["rollout", "recompute"] = Field(
        "rollout",
        description="policy the ratio is taken against: the sampler's numbers, or the learner's own before the update",
    )
    correction: Literal["none", "tis", "icepop"] = Field(
        "none", description="weight of a token's policy loss for π_old not being the policy that sampled it"
    )
    correction_level: Literal["token", "sequence"] = Field(
        "token", description="each token's own weight, or the geometric mean over its sample"
    )
    correction_cap: float = Field(2.0, ge=1, description="largest weight of tis")
    icepop_low: float = Field(0.5, ge=0, le=1, description="icepop: a smaller weight becomes 0")
    icepop_high: float = Field(2.0, ge=1, description="icepop: a larger weight becomes 0")
    sequence_mask_delta: float | None = Field(
        None, gt=0, description="drop tokens with A < 0 of samples that lost more log-prob than this per token; off"
    )

    kl_coef: float = Field(
        0.0, ge=0, description="weight of the KL loss to the frozen initial model; 0 keeps no such model"
    )
    kl_estimator: Literal["k2", "k3"] = Field("k3", description="of the loss from one sampled token")
    kl_reward_coef: float = Field(0.0, ge=0, description="weight of the KL to that model, subtracted from the reward")
    kl_reward_estimator: Literal["k1", "k3"] = Field("k1", description="of the reward from one sampled token")
    entropy_coef: float = Field(0.0, ge=0, description="weight of the entropy bonus over the full vocabulary")

    credit: Literal["episode", "turn"] = Field(
        "episode", description="one advantage for the whole episode, or one for each turn from its reward to go"
    )
    discount: float = Field(1.0, gt=0, le=1, description="of the reward to go, for each turn; with credit = 'turn'")

    filter_zero_variance: bool = Field(
        False, description="drop groups whose raw rewards are all equal and sample another in their place"
    )
    filter_mean_range: tuple[float, float] | None = Field(
        None, description="drop groups whose mean raw reward is outside [low, high]: too hard or too easy; off"
    )
    filter_quantiles: tuple[float, float] | None = Field(
        None, description="drop groups whose mean raw reward is outside these quantiles of the step's groups; off"
    )
    filter: str | None = Field(
        None, description="'module:function' that takes a Group and returns why to drop it, or None to keep it"
    )

    @field_validator("kl_estimator", mode="before")
    @classmethod
    def _no_k1_loss(cls, value: Any) -> Any:
        if value == "k1":
            raise ValueError(
                "k1 is no loss: its gradient does not depend on the reference model; use 'k2' or 'k3', or put it into "
                "the reward with kl_reward_coef"
            )
        return value

    @field_validator("filter")
    @classmethod
    def _loadable(cls, value: str | None) -> str | None:
        if value is None:
            return None
        try:
            found = load(value)
        except PluginError as error:
            raise ValueError(f"{error}; give 'module:function'") from error
        if not callable(found):
            raise ValueError(f"is a {type(found).__name__}; give a function that takes a relax_gym.types.Group")
        return value

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if (self.aggregation == "seq-mean-token-sum-norm") != (self.token_sum_norm is not None):
            raise ValueError(
                "aggregation 'seq-mean-token-sum-norm' and token_sum_norm go together; give both (the norm is usually "
                "the longest completion in tokens) or neither"
            )
        if self.correction != "none" and self.old_logprobs == "rollout":
            raise ValueError(
                f"correction = {self.correction!r} needs old_logprobs = 'recompute': with 'rollout' the ratio is taken "
                "against the sampler's own log-probs already, and every weight is 1"
            )
        if self.filter_mean_range is not None and self.filter_mean_range[0] > self.filter_mean_range[1]:
            raise ValueError(f"filter_mean_range = {list(self.filter_mean_range)} is empty; give [low, high]")
        if self.filter_quantiles is not None and not 0 <= self.filter_quantiles[0] < self.filter_quantiles[1] <= 1:
            raise ValueError(
                f"filter_quantiles = {list(self.filter_quantiles)} are no quantiles; give [low, high] with "
                "0 <= low < high <= 1"
            )
        return self

    @model_validator(mode="after")
    def _refuse_idle_options(self) -> Self:
        """An option that was changed and does nothing is a mistake."""
        tis, icepop = self.correction == "tis", self.correction == "icepop"
        goes_with = {
            "correction_cap": ("correction = 'tis'", tis),
            "correction_level": ("a correction", tis or icepop),
            "icepop_low": ("correction = 'icepop'", icepop),
            "icepop_high": ("correction = 'icepop'", icepop),
            "kl_estimator": ("kl_coef > 0", self.kl_coef > 0),
            "kl_reward_estimator": ("kl_reward_coef > 0", self.kl_reward_coef > 0),
            "discount": ("credit = 'turn'", self.credit == "turn"),
        }
        for name, (master, on) in goes_with.items():
            if self.changed(name) and not on:
                raise ValueError(f"{name} = {getattr(self, name)!r} goes with {master} and does nothing without it")
        return self

    def changed(self, name: str) -> bool:
        """Whether an option has another value than its default."""
        return bool(getattr(self, name) != type(self).model_fields[name].default)

    def check_run(self, config: RunConfig) -> None:
        """Raise ConfigError when these options do not go with the rest of the run. Called when a config is read."""
        weights = {reward.name: reward.weight for reward in config.reward}
        if self.credit == "turn" and weights.get("env") != 1:
            raise ConfigError(
                "algorithm.credit = 'turn' spreads the env's own rewards over the turns, so [[reward]] must have "
                f"'env' with weight 1 (it has {weights}); weigh the other rewards against it instead"
            )
        on_policy = self.old_logprobs == "recompute" and self.correction == "none"
        train = config.train
        if not train.on_policy and on_policy and self.is_policy_gradient:
            raise ConfigError(
                f"train.max_staleness = {train.max_staleness} with update_every = {train.update_every}, "
                "algorithm.old_logprobs = 'recompute' and no correction would train on stale tokens as if they were "
                "on-policy: the ratio starts at 1 whoever sampled them; set correction = 'tis' or 'icepop', "
                "old_logprobs = 'rollout', or max_staleness = 0 and update_every = 1"
            )

    @property
    def is_policy_gradient(self) -> bool:
        """Whether the loss is an expectation over the policy's own tokens, so that it matters which policy that was."""
        return True

    @property
    def leaves_out_flat(self) -> bool:
        """Whether samples of advantage 0 leave the batch and the loss's denominators; else they count as trained."""
        return False

    @property
    def needs_group(self) -> bool:
        """Whether a group of one episode gives no learning signal."""
        return True

    @property
    def needs_batch(self) -> bool:
        """Whether more than the denominators of a sample's loss depends on the other groups of its batch."""
        over_batch = type(self).batch_advantages is not Algorithm.batch_advantages
        return over_batch or self.filter_quantiles is not None

    @property
    def needs_reference(self) -> bool:
        """Whether the learner must keep the frozen initial model."""
        return self.kl_coef > 0 or self.kl_reward_coef > 0

    @property
    def distillation(self) -> Distillation | None:
        """The teachers that learners draw the policy to, and how; None without."""
        return None

    def shaped_rewards(self, group: Group) -> FloatArray:
        """Rewards that the advantages are made of, [G]; NaN where unscored. Filters look at the raw ones."""
        return group.rewards

    @abstractmethod
    def advantages(self, rewards: FloatArray) -> FloatArray:
        """Rewards of one group [G] → one advantage for each episode [G].

        With `credit = "turn"` these are the rewards to go of all turns of the group instead, and one advantage for each
        turn comes back. NaN marks what could not be scored: leave it out of every statistic and return 0 for it.
        """

    def batch_advantages(self, advantages: FloatArray) -> FloatArray:
        """Advantages [N] of all trained tokens of the scored episodes of the global batch; identity by default."""
        return advantages

    @abstractmethod
    def token_loss(self, tokens: TrainedTokens) -> Tensor:
        """Loss of each trained token, [N], differentiable in `tokens.logprobs`."""
