"""A dense MLP of gated linear units whose activation goes over memory once, in backward too, and may be computed again
there rather than kept: a fifth of a layer's memory, for 3 % of its time."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from relax_gym_trainers.fused import fused
from relax_gym_trainers.megatron_learner import compat  # noqa: F401  (before megatron)

from megatron.core.tensor_parallel.random import CheckpointWithoutOutput  # isort: skip
from megatron.core.transformer.mlp import MLP  # isort: skip
from megatron.core.transformer.spec_utils import ModuleSpec  # isort: skip


class GatedMLP(MLP):  # type: ignore[misc]
    """silu(gate) · up, without biases. Megatron's own recomputes all of the MLP, or nothing."""

    def forward(self, hidden_states: Tensor, per_token_scale: None = None, **options: Any) -> tuple[Tensor, None]:
        """[t, b, hidden] → the same, and no bias."""
        between, _ = self.linear_fc1(hidden_states)
        if self.config.recompute_granularity != "selective":
            return self.linear_fc2(gated(between))[0], None
        kept = CheckpointWithoutOutput(fp8=None)
        out, _ = self.linear_fc2(kept.checkpoint(gated, between))
        kept.discard_output_and_register_recompute(out)
        return out, None


def use_gated(spec: Any) -> Any:
    """What megatron-core builds an MLP from, for a `GatedMLP`."""
    if isinstance(spec, functools.partial):  # from 0.19
        return functools.partial(GatedMLP.as_mlp_submodule, **spec.keywords)
    return ModuleSpec(module=GatedMLP, submodules=spec.submodules)


def gated(between: Tensor) -> Tensor:
    """[.., 2 n], gates and then what they let through → silu(gate) · up, [.., n]."""
    out: Tensor = _Gated.apply(between.view(-1, between.shape[-1]))
    return out.view(*between.shape[:-1], -1)


class _Gated(torch.autograd.Function):
    """Its gradient is written where the gradient of both halves is; a compiler that is left to join them reads all of
    it twice."""

    @staticmethod
    def forward(ctx: Any, between: Tensor) -> Tensor:
        ctx.save_for_backward(between)
        return _activate(*between.chunk(2, -1))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (between,) = ctx.saved_tensors
        into = torch.empty_like(between)
        _differentiate(grad, *between.chunk(2, -1), *into.chunk(2, -1))
        return into


@fused
def _activate(gate: Tensor, up: Tensor) -> Tensor:
    return (torch.nn.functional.silu(_exact(gate)) * up).to(gate.dtype)


@fused
def _differentiate(grad: Tensor, gate: Tensor, up: Tensor, into_gate: Tensor, into_up: Tensor) -> None:
    grad, gate = _exact(grad), _exact(gate)
    share = gate.sigmoid()
    into_gate.copy_(grad * up * share * (1 + gate * (1 - share)))
    into_up.copy_(grad * gate * share)


def _exact(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))
