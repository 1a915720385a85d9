"""Rotary positions by token, instead of by row: any pack, any share of a context-parallel rank, any positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from relax_gym_trainers.fused import fused
from relax_gym_trainers.megatron_learner import compat  # noqa: F401  (before megatron)
from relax_gym_trainers.megatron_learner.modules.norms import rms_norm

from megatron.core.transformer.attention import SelfAttention  # isort: skip


class RotaryAttention(SelfAttention):  # type: ignore[misc]
    """Megatron's, for packed rows whose `rotary` was set by `keep_angles`.

    Megatron turns each row of a pack apart, by positions that it counts itself, and copies and norms queries before.
    Here what the linear layer gives goes over memory once, and so does its gradient.
    """

    _angles: tuple[Tensor, Tensor]

    def forward(self, *args: Any, packed_seq_params: Any, **options: Any) -> Any:
        """As Megatron's."""
        self._angles = packed_seq_params.rotary
        return super().forward(*args, packed_seq_params=packed_seq_params, **options)

    def get_query_key_value_tensors(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Of tokens [t, 1, hidden] the queries [t, 1, heads, d], keys and values [t, 1, groups, d], ready to attend."""
        mixed, (_, _, size) = super().get_query_key_value_tensors(*args, **{**options, "split_qkv": False})
        norms = [self.q_layernorm.weight, self.k_layernorm.weight] if self.config.qk_layernorm else []
        heads = mixed.view(len(mixed), -1, size)
        made = split_and_turn(heads, mixed.shape[2], *self._angles, self.config.layernorm_epsilon, *norms)
        query, key, value = (each[:, None] for each in made)
        return query, key, value


def keep_angles(
    packed: Any, positions: Tensor, frequencies: Tensor, dtype: torch.dtype, axes: Tensor | None = None
) -> None:
    """Set `packed.rotary`, what `turn` takes for the positions, unless it is set.

    Args:
        positions: [1, t], or one row for each axis.
        axes: Which row the positions of each frequency are in, if there are several.
    """
    if not hasattr(packed, "rotary"):
        own = positions[0, :, None] if len(positions) == 1 or axes is None else positions[axes].T
        angles = (own.float() * frequencies)[:, None]
        cosines, sines = angles.cos(), angles.sin()
        packed.rotary = torch.cat((cosines, cosines), -1).to(dtype), torch.cat((-sines, sines), -1).to(dtype)


@fused
def split_and_turn(
    mixed: Tensor, groups: int, cosines: Tensor, sines: Tensor, eps: float, *norms: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """[t, groups · (n + 2), d], in each group n queries, a key and a value: queries [t, groups · n, d], keys and values
    [t, groups, d]. Queries and keys are turned, after an `rms_norm` by `norms`, [d] each, where a model has them."""
    apart = mixed.view(len(mixed), groups, -1, mixed.shape[-1])
    query, key, value = torch.split(apart, [apart.shape[2] - 2, 1, 1], dim=2)
    query, key = query.flatten(1, 2), key.flatten(1, 2)
    if norms:
        query, key = rms_norm(query, norms[0], eps), rms_norm(key, norms[1], eps)
    return turn(query, cosines, sines), turn(key, cosines, sines), value.flatten(1, 2).clone()


def turn(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """[t, heads, d] by angles, the first half of each head paired with the second. Cosines and sines are [t, 1, d],
    those of the first half with a minus."""
    halves = heads.view(*heads.shape[:-1], 2, -1).flip(-2)  # which costs a compiled kernel nothing, as a `cat` would
    return heads * cosines + halves.flatten(-2) * sines
