"""Options of the Megatron learner. Checked when the config is read: nothing heavy is imported."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from relax_gym_trainers.torch_learner.options import LearnerOptions, LoraOptions

TORCH_ONLY = {
    "freeze": 'learner.name = "torch" does, and freeze_encoders is here, too',
    "activation_checkpointing": "learner.recompute says what is computed again",
}


class MegatronLearnerOptions(LearnerOptions):
    """`[learner]` with `name = "megatron"`. The world has tp · pp · cp · dp ranks."""

    may_change = (
        *("tp", "pp", "vpp", "cp", "ep", "etp", "dp", "sequence_parallel", "distributed_optimizer", "recompute"),
        *("offload_reference", "offload_optimizer", "stream", "micro_batch_tokens", "logprob_chunk"),
        *("checkpoint_model", "launcher", "timeout", "start_timeout"),
    )

    @model_validator(mode="before")
    @classmethod
    def _point_to_the_torch_learner(cls, given: Any) -> Any:
        if isinstance(given, dict) and (found := sorted(key for key in TORCH_ONLY if given.get(key))):
            raise ValueError(f"the Megatron learner has no {found[0]}; {TORCH_ONLY[found[0]]}")
        return given

    @field_validator("lora")
    @classmethod
    def _without_dropout(cls, given: LoraOptions | None) -> LoraOptions | None:
        if given is not None and given.dropout:
            raise ValueError(f'the Megatron learner has no dropout, not {given.dropout}; learner.name = "torch" has it')
        return given

    tp: int = Field(1, ge=1, description="ranks that share each matrix")
    pp: int = Field(1, ge=1, description="pipeline stages")
    vpp: int = Field(1, ge=1, description="chunks of layers of each pipeline stage")
    cp: int = Field(1, ge=1, description="ranks that share each sequence")
    ep: int = Field(1, ge=1, description="ranks that share the experts of a layer")
    etp: int | None = Field(None, ge=1, description="ranks that share each expert's matrices; default: tp")
    dp: int = Field(1, ge=1, description="ranks that take different samples")
    sequence_parallel: bool | None = Field(
        None, description="share the tokens between matrices among the tp ranks; default: if tp > 1"
    )
    distributed_optimizer: bool = Field(True, description="share the optimizer's state among the dp ranks")
    micro_batch_tokens: int = Field(
        4096, ge=1, description="most tokens, padding included, of one forward pass, for each of its cp ranks"
    )
    logprob_chunk: int = Field(4096, ge=1, description="tokens whose logits over the vocabulary exist at one time")
    recompute: Literal["none", "selective", "full"] = Field(
        "none", description="activations computed again in backward: less memory, more time"
    )
    offload_reference: bool = Field(
        False, description="keep weights of reference and teachers in host memory, on the devices only for their passes"
    )
    lora: LoraOptions | None = Field(None, description="train adapters (LoRA) instead of the weights")
    checkpoint_model: bool = Field(
        True, description="make checkpoints model folders, too; else `relax-gym export` makes one of them"
    )
    launcher: Literal["processes", "ray"] = Field(
        "processes",
        description='start ranks as children of the trainer, or on a "ray" cluster; torchrun has its own',
    )
    timeout: float = Field(1800.0, gt=0, description="seconds that one call of all ranks may take")
    start_timeout: float = Field(600.0, gt=0, description="seconds until all ranks have loaded the model")

    @property
    def patience(self) -> timedelta:
        """How long a rank waits for the others in a collective: no less than any call may take."""
        return timedelta(seconds=max(self.timeout, self.start_timeout))
