"""Options of the torch learner and its teacher engine. Checked when the config is read: nothing heavy is imported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from relax_gym.algorithm import Algorithm
from relax_gym.config import Options, RunConfig, load_algorithms
from relax_gym.errors import ConfigError
from relax_gym.section import Section


class LoraOptions(Section):
    """`[learner.lora]`: train low-rank adapters instead of the weights."""

    rank: int = Field(16, ge=1, description="of the two matrices of each adapter: the smaller side of both")
    alpha: float = Field(32.0, gt=0, description="what an adapter adds is multiplied by alpha / rank")
    targets: tuple[str, ...] | Literal["all-linear"] = Field(
        "all-linear",
        description="names of the adapted modules; all-linear: all linears but the head, no stacked experts",
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="share of an adapter's inputs that is dropped in training")


class LearnerOptions(Options):
    """What every learner of policies has."""

    lr: float = Field(1e-6, gt=0, description="learning rate of AdamW, the highest of the schedule")
    betas: tuple[float, float] = Field((0.9, 0.95), description="decay of AdamW's moments")
    eps: float = Field(1e-8, gt=0, description="AdamW's epsilon")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's, in units of the learning rate")
    grad_clip: float = Field(1.0, ge=0, description="largest norm of the gradient; 0: not clipped")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="what the learning rate does from warmup_steps to the last step"
    )
    warmup_steps: int = Field(0, ge=0, description="steps over which the learning rate rises linearly to lr")
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="where linear and cosine end, in units of lr")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="of the arithmetic (weights stay float32); auto: bfloat16 where the hardware has it"
    )
    micro_batch_tokens: int = Field(4096, ge=1, description="most tokens, padding included, of one forward pass")
    updates_per_step: int = Field(1, ge=1, description="optimizer updates each batch is split into, by groups")
    epochs: int = Field(1, ge=1, description="how often each batch is gone through")
    stream: bool = Field(
        False,
        description="train on groups as they finish, while others of their step are sampled; sums are then in another "
        "order, so that a run is not the same bit for bit",
    )
    logprob_chunk: int = Field(1024, ge=1, description="tokens whose logits over the vocabulary exist at one time")
    offload_optimizer: bool = Field(
        False,
        description="keep what the optimizer has (moments; of bfloat16 weights float32 copies) in host memory, on the "
        "device only for updates",
    )
    freeze_encoders: bool = Field(
        False, description="do not train what turns images, video and audio into embeddings: encoders and projectors"
    )

    def check_run(self, config: RunConfig) -> None:
        """Every update of a step must get the same number of groups, and groups that are streamed need no others."""
        algorithms = load_algorithms(config)
        if self.stream:
            self._check_stream(config, algorithms)
        if config.train.groups_per_step % self.updates_per_step:
            raise ConfigError(
                f"learner.updates_per_step = {self.updates_per_step} does not divide train.groups_per_step = "
                f"{config.train.groups_per_step}; every update must get the same number of groups"
            )
        if self.updates_per_step > 1 and any(algorithm.filter_quantiles for algorithm in algorithms):
            raise ConfigError(
                f"algorithm.filter_quantiles leaves a number of groups that learner.updates_per_step = "
                f"{self.updates_per_step} need not divide, and every update must get the same number; set "
                "updates_per_step = 1, or use filter_mean_range, which replaces what it drops"
            )

    def _check_stream(self, config: RunConfig, algorithms: Sequence[Algorithm]) -> None:
        if self.updates_per_step * self.epochs > 1:
            raise ConfigError(
                f"learner.stream with updates_per_step = {self.updates_per_step} and epochs = {self.epochs}: what is "
                "there before a step is the gradient of one update; set both to 1"
            )
        if config.sampler.options.get("colocate"):
            raise ConfigError(
                "learner.stream with sampler.colocate: the servers have the devices' memory while groups are sampled; "
                "leave one of the two out"
            )
        if any(algorithm.needs_batch for algorithm in algorithms):
            raise ConfigError(
                "learner.stream with an algorithm that looks at the whole batch, for its advantages or by "
                "filter_quantiles; leave one of the two out, or take one that looks at groups, such as grpo"
            )
        if len({algorithm.aggregation == "token-mean" for algorithm in algorithms}) > 1:
            raise ConfigError(
                "learner.stream with algorithms of which some average over tokens and some over samples; give all the "
                "same aggregation"
            )


class TorchLearnerOptions(LearnerOptions):
    """`[learner]` with `name = "torch"`."""

    may_change = (
        "device",
        "stream",
        "micro_batch_tokens",
        "logprob_chunk",
        "activation_checkpointing",
        "offload_optimizer",
    )

    device: str = Field("auto", description="auto: cuda if there is one, else cpu")
    activation_checkpointing: bool = Field(False, description="recompute activations: less memory, more time")
    share_prefix: bool = Field(True, description="compute a prompt that several samples begin with only once")
    freeze: tuple[str, ...] = Field((), description="globs of parameter names that are not trained")
    lora: LoraOptions | None = Field(None, description="train adapters (LoRA) instead of the weights")


class LocalTeacherOptions(Options):
    """`teacher_engine` with `name = "local"`: each teacher in a process of its own."""

    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="of weights and arithmetic, as [learner]")
    device: str = Field("auto", description="auto: cuda if there is one, else cpu")
    threads: int | None = Field(None, ge=1, description="CPU threads of each process; default: those of the run")
    micro_batch_tokens: int = Field(4096, ge=1, description="most tokens, padding included, of one forward pass")
    share_prefix: bool = Field(True, description="compute a prompt that several samples begin with only once")
    logprob_chunk: int = Field(1024, ge=1, description="tokens whose logits over the vocabulary exist at one time")
    timeout: float = Field(600.0, gt=0, description="seconds that loading, or one answer, may take")
