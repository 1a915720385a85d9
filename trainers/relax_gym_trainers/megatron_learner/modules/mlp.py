"""A dense MLP whose activation is computed again in backward rather than kept: a fifth of a layer's memory, for 3 % of
its time."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from relax_gym_trainers.megatron_learner import compat  # noqa: F401  (before megatron)

from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl  # isort: skip
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput  # isort: skip
from megatron.core.transformer.mlp import MLP  # isort: skip
from megatron.core.transformer.spec_utils import ModuleSpec  # isort: skip


class LeanMLP(MLP):  # type: ignore[misc]
    """silu(gate) · up, without biases; Megatron's own recomputes all of the MLP, or nothing."""

    def forward(self, hidden_states: Tensor, per_token_scale: None = None, **options: Any) -> tuple[Tensor, None]:
        """[t, b, hidden] → the same, and no bias."""
        kept = CheckpointWithoutOutput(fp8=None)
        between, _ = self.linear_fc1(hidden_states)
        out, _ = self.linear_fc2(kept.checkpoint(_activated, between))
        kept.discard_output_and_register_recompute(out)
        return out, None


def lean(spec: Any) -> Any:
    """What megatron-core builds an MLP from, for a `LeanMLP`."""
    if isinstance(spec, functools.partial):  # from 0.19
        return functools.partial(LeanMLP.as_mlp_submodule, **spec.keywords)
    return ModuleSpec(module=LeanMLP, submodules=spec.submodules)


def _activated(between: Tensor) -> Tensor:
    activated: Tensor = bias_swiglu_impl(between, None)
    return activated
