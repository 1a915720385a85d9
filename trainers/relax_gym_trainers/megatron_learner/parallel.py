"""How a model is laid out over processes."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from relax_gym.errors import ConfigError
from relax_gym_trainers.megatron_learner import compat
from relax_gym_trainers.megatron_learner.families.base import expert_size, number_of_experts

from megatron.core import parallel_state, tensor_parallel  # isort: skip

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel groups; the world has tp · pp · cp · dp ranks, and experts share it as etp · ep · pp · ….

    Attributes:
        tp: Ranks that share each matrix.
        pp: Pipeline stages.
        vpp: Chunks of layers of each stage (interleaved pipeline).
        cp: Ranks that share each sequence.
        ep: Ranks that share the experts of a layer.
        etp: Ranks that share each expert's matrices; None is `tp`.
        dp: Ranks that take different samples.
        sequence_parallel: Between matrices each tensor-parallel rank keeps its share of the tokens. None is `tp > 1`.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    dp: int = 1
    sequence_parallel: bool | None = None

    def __post_init__(self) -> None:
        if self.etp is None:
            object.__setattr__(self, "etp", self.tp)
        if self.sequence_parallel is None:
            object.__setattr__(self, "sequence_parallel", self.tp > 1)
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "sequence_parallel" and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"learner.{field.name} = {value!r}: give a whole number from 1")
        if self.sequence_parallel and self.tp == 1:
            raise ConfigError("learner.sequence_parallel = true needs learner.tp > 1: it shares tokens among its ranks")
        if self.vpp > 1 and self.pp == 1:
            raise ConfigError(f"learner.vpp = {self.vpp} needs learner.pp > 1: it cuts pipeline stages into chunks")
        share = self.expert_ranks * self.ep
        if self.tp * self.cp * self.dp % share:
            raise ConfigError(
                f"learner.etp · learner.ep = {share} does not divide tp · cp · dp = {self.tp * self.cp * self.dp}, the "
                "ranks of a pipeline stage; change ep, etp or dp"
            )

    def __str__(self) -> str:
        """As `tp2 pp2 etp2 sp`: what is not 1."""
        named = [f"{f.name}{value}" for f in fields(self) if (value := getattr(self, f.name)) != 1]
        return " ".join(name for name in named if not name.startswith("seq")) + " sp" * bool(self.sequence_parallel)

    @property
    def expert_ranks(self) -> int:
        """Ranks that share each expert's matrices."""
        return self.etp or self.tp

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def token_multiple(self) -> int:
        """Each row of a pack is padded to a multiple of this many tokens."""
        return (2 * self.cp if self.cp > 1 else 1) * (self.tp if self.sequence_parallel else 1)

    def check(self, config: PretrainedConfig) -> None:
        """Whether a model can be laid out so.

        Args:
            config: Text config in Hugging Face format.

        Raises:
            ConfigError: a size that does not divide what it shares out, or experts with `tp` and no sequence parallel.
        """
        shares = [
            ("tp", self.tp, "attention heads", config.num_attention_heads),
            ("tp", self.tp, "key/value heads", config.num_key_value_heads),
            ("pp · vpp", self.pp * self.vpp, "layers", config.num_hidden_layers),
        ]
        experts = number_of_experts(config)
        if experts:
            shares += [
                ("ep", self.ep, "experts", experts),
                ("etp", self.expert_ranks, "hidden units of an expert", expert_size(config)),
            ]
        elif self.ep > 1:
            raise ConfigError(f"learner.ep = {self.ep}, but a {config.model_type} model has no experts; set it to 1")
        else:
            shares.append(("tp", self.tp, "hidden units of the feed-forward network", config.intermediate_size))
        for name, size, what, number in shares:
            if number % size:
                raise ConfigError(f"learner.{name} = {size} does not divide the {number} {what} of the model")
        if experts and self.tp > 1 and not self.sequence_parallel:
            raise ConfigError(
                "learner.sequence_parallel = false, but experts with learner.tp > 1 need it; leave it out or set tp = 1"
            )

    def megatron_options(self) -> dict[str, Any]:
        """The sizes as arguments of `TransformerConfig`."""
        options: dict[str, Any] = {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "context_parallel_size": self.cp,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.expert_ranks,
            "sequence_parallel": self.sequence_parallel,
        }
        if self.vpp > 1:
            # With the defaults an interleaved pipeline computes garbage without a word.
            options |= {
                "virtual_pipeline_model_parallel_size": self.vpp,
                "overlap_p2p_comm": True,
                "batch_p2p_comm": False,
            }
        return options


def initialise(
    layout: Layout,
    rank: int,
    init_method: str,
    backend: str,
    *,
    seed: int = 0,
    timeout: timedelta | None = None,
) -> None:
    """Join the process group and form the parallel groups; every rank calls it.

    Args:
        init_method: Where ranks meet: `tcp://host:port`, `file:///path` or `env://`.
        backend: `nccl`, `gloo` or `cpu:gloo,cuda:nccl`.
        seed: Of the random streams (dropout); the generators of the process are left alone on a CPU.
        timeout: How long a rank waits for the others in a collective, in parallel groups in whole minutes; by default
            as long as torch and megatron-core do.

    Raises:
        ConfigError: `rank` is none of the layout's, or torchrun's world has another size.
    """
    if not 0 <= rank < layout.world_size:
        raise ConfigError(f"rank {rank} joins a layout of {layout.world_size} ranks; start as many processes as that")
    compat.prepare()
    if torch.cuda.is_available():
        torch.cuda.set_device(local_device(rank))
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=layout.world_size, timeout=timeout)
    minutes = {} if timeout is None else {"distributed_timeout_minutes": math.ceil(timeout / timedelta(minutes=1))}
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.expert_ranks,
        **minutes,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def local_device(rank: int) -> torch.device:
    """The device of a rank: torchrun's `LOCAL_RANK`, else its rank among this machine's devices; or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    import os

    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank % torch.cuda.device_count())))


def destroy() -> None:
    """Leave all groups. Idempotent."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        for name, value in list(vars(parallel_state).items()):
            if isinstance(value, dist.ProcessGroup):  # it forgets some, whose threads a fork of this process has not
                setattr(parallel_state, name, None)
        dist.destroy_process_group()
