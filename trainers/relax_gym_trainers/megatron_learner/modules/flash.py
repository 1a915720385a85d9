"""torch's flash kernel for packed rows of any length and grouped queries.

Its public face, `torch.nn.attention.varlen.varlen_attn`, takes no grouped queries in most releases, and copies of keys
and values for each query cost 5 % of a step. So this calls the two operators under it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from relax_gym_trainers.megatron_learner.modules.pieces import Pieces

_LARGEST_HEAD = 256


def can_attend_packed(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether `attend_packed` takes these [t, heads, d]: there is a kernel for their device, precision and sizes."""
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] == key.shape[-1] == value.shape[-1] <= _LARGEST_HEAD
        and query.shape[-1] % 8 == 0
    )


def attend_packed(query: Tensor, key: Tensor, value: Tensor, pieces: Pieces, scale: float | None) -> Tensor:
    """Queries [q, heads, d], keys and values [k, fewer, d] of all pieces → [q, heads, d]."""
    out: Tensor = _Flash.apply(*map(_with_whole_heads, (query, key, value)), pieces, scale)
    return out


class _Flash(torch.autograd.Function):
    """Causal: the queries of a run are the last of its keys."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, pieces: Pieces, scale: float | None) -> Tensor:
        ctx.rows = (pieces.query_starts, pieces.key_starts, max(pieces.queries), max(pieces.keys), 0.0, True)
        ctx.scale = scale
        out, normaliser, *random, _ = _forward(query, key, value, *ctx.rows, False, scale=scale)
        ctx.save_for_backward(query, key, value, out, normaliser, *random)
        whole: Tensor = out
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, normaliser, *random = ctx.saved_tensors
        into = _backward(grad.contiguous(), query, key, value, out, normaliser, *ctx.rows, *random, scale=ctx.scale)
        return *into, None, None


_forward = torch.ops.aten._flash_attention_forward
_backward = torch.ops.aten._flash_attention_backward


def _with_whole_heads(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
