"""Rotary positions by token, instead of by row: any pack, any share of a context-parallel rank, any positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from relax_gym_trainers.fused import fused
from relax_gym_trainers.megatron_learner import compat  # noqa: F401  (before megatron)
from relax_gym_trainers.megatron_learner.modules.attention import CoreAttention
from relax_gym_trainers.megatron_learner.modules.norms import LaterNorm, rms_norm


class RotaryAttention(CoreAttention):
    """`CoreAttention` that first turns queries and keys by the angles kept with the pack.

    Megatron turns each row of a pack apart, by positions that it counts itself.

    Attributes:
        norms: Those of queries and keys, applied before that in the same pass over memory, where a model has them.
    """

    norms: tuple[LaterNorm, LaterNorm] | None = None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """As `CoreAttention.forward`, for packed rows whose `rotary` was set by `keep_angles`."""
        cosines, sines = packed_seq_params.rotary
        if self.norms is None:
            query, key = turn_both(query, key, cosines, sines)
        else:
            first, second = self.norms
            eps = first.eps or 0.0
            query, key = norm_and_turn_both(query, key, first.weight, second.weight, eps, cosines, sines)
        return super().forward(query, key, value, attention_mask, attn_mask_type, attention_bias, packed_seq_params)


def keep_norms(layers: Any) -> None:
    """Let the attention of Megatron's layers apply the `LaterNorm`s of their queries and keys."""
    for layer in layers:
        attention = layer.self_attention
        if isinstance(attention.q_layernorm, LaterNorm):
            attention.core_attention.norms = attention.q_layernorm, attention.k_layernorm


def keep_angles(
    packed: Any, positions: Tensor, frequencies: Tensor, dtype: torch.dtype, axes: Tensor | None = None
) -> None:
    """Set `packed.rotary`, cosines and sines [t, 1, head] of the positions, unless it is set.

    Args:
        positions: [1, t], or one row for each axis.
        axes: Which row the positions of each frequency are in, if there are several.
    """
    if not hasattr(packed, "rotary"):
        own = positions[0, :, None] if len(positions) == 1 or axes is None else positions[axes].T
        angles = own.float() * frequencies
        angles = torch.cat((angles, angles), -1)[:, None]
        packed.rotary = angles.cos().to(dtype), angles.sin().to(dtype)


@fused
def turn_both(query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
    """`turn` each."""
    return turn(query, cosines, sines), turn(key, cosines, sines)


@fused
def norm_and_turn_both(
    query: Tensor, key: Tensor, query_weight: Tensor, key_weight: Tensor, eps: float, cosines: Tensor, sines: Tensor
) -> tuple[Tensor, Tensor]:
    """`turn` each after its `rms_norm`."""
    query, key = rms_norm(query, query_weight, eps), rms_norm(key, key_weight, eps)
    return turn(query, cosines, sines), turn(key, cosines, sines)


def turn(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """[t, heads, head] turned; the first half of each head pairs with the second."""
    first, second = heads.chunk(2, -1)
    return heads * cosines + torch.cat((-second, first), -1) * sines
