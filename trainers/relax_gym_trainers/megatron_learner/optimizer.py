"""Data-parallel gradients and Megatron's optimizer, with an update that refuses broken gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from relax_gym.errors import TrainingError
from relax_gym_trainers.megatron_learner import compat  # noqa: F401  (before megatron)
from relax_gym_trainers.megatron_learner.options import MegatronLearnerOptions
from relax_gym_trainers.torch_learner.optimizer import non_finite

from megatron.core.distributed import (  # isort: skip
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # isort: skip
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32  # isort: skip


def wrap(chunks: Sequence[Any], options: MegatronLearnerOptions) -> list[Any]:
    """The chunks with buffers for their gradients, summed in float32 over the ranks that see other samples."""
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=options.distributed_optimizer, grad_reduce_in_fp32=True
    )
    return [
        DistributedDataParallel(chunk.config, config, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]


def add_up(wrapped: Sequence[Any]) -> None:
    """The gradients of this rank's micro-batches become those of all. Once an update, as what was added up would be
    added up again: Megatron's schedules, which an update of several pieces goes through several times, do not do it.
    """
    finalize_model_grads(list(wrapped))


def build_optimizer(wrapped: Sequence[Any], options: MegatronLearnerOptions, dtype: torch.dtype) -> Any:
    """AdamW over all parameters of the chunks, with float32 copies of them if they are not."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=options.lr,
        adam_beta1=options.betas[0],
        adam_beta2=options.betas[1],
        adam_eps=options.eps,
        weight_decay=options.weight_decay,
        clip_grad=options.grad_clip,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_distributed_optimizer=options.distributed_optimizer,
    )
    # Without overrides: Megatron's usual ones spare norms and biases the weight decay.
    optimizer = get_megatron_optimizer(config, list(wrapped), config_overrides={})
    for one in parts(optimizer):
        if isinstance(one.optimizer, torch.optim.AdamW):  # not Apex's, nor Transformer Engine's
            for group in one.optimizer.param_groups:
                group["fused"] = True  # one kernel
    return optimizer


def apply_gradient(optimizer: Any, *, lr: float, clip: float, step: int) -> float:
    """Clip the gradient to norm `clip` (0: not), take one optimizer step. Returns the norm before.

    Raises:
        TrainingError: the gradient is not finite; neither weights nor optimizer state have changed.
    """
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if not math.isfinite(norm):
        optimizer.zero_grad()
        raise TrainingError(non_finite("gradient norm", norm, step))
    for one in parts(optimizer):
        if clip and one.get_parameters():
            clip_grad_by_total_norm_fp32(one.get_parameters(), max_norm=clip, total_norm=norm)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step_with_ready_grads()
    # One that is not distributed has made Megatron's buffers the parameters' `grad`: the next backward pass would add
    # to them, and then them to themselves.
    optimizer.zero_grad()
    return norm


def forget(optimizer: Any) -> None:
    """Drop the moments and the count of steps; what is optimized stays."""
    for one in inner(optimizer):
        one.state.clear()
        for group in one.param_groups:
            group.pop("step", None)  # where Transformer Engine's and Apex's count


def parts(optimizer: Any) -> list[Any]:
    """The optimizers that a chained one has: experts have one of their own."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def inner(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The optimizers of torch under it."""
    return [one.optimizer for one in parts(optimizer) if not getattr(one, "is_stub_optimizer", False)]
