"""torch's attention over rows of any length, whose arguments and abilities differ between releases of torch."""

from __future__ import annotations

import contextlib
import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor

from relax_gym_trainers.megatron_learner.modules.pieces import Alone, Pieces

varlen_attn: Any = None
with contextlib.suppress(ImportError):  # torch before 2.10 has none
    from torch.nn.attention import varlen

    varlen_attn = varlen.varlen_attn

_LARGEST_HEAD = 256


def can_attend_packed(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> bool:
    """Whether `attend_packed` takes these [t, heads, d]: a flash kernel for their device, precision and sizes."""
    return (
        varlen_attn is not None
        and query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] == key.shape[-1] == value.shape[-1] <= _LARGEST_HEAD
        and query.shape[-1] % 8 == 0
        and (scale is None or "scale" in _arguments())
    )


def attend_packed(query: Tensor, key: Tensor, value: Tensor, pieces: Pieces, scale: float | None) -> Tensor:
    """Queries [q, heads, d], keys and values [k, fewer, d] of all pieces → [q, heads, d]."""
    takes = _arguments()
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in takes else {"is_causal": True}
    if scale is not None:
        options["scale"] = scale
    if query.shape[1] != key.shape[1]:
        if "enable_gqa" in takes:
            options["enable_gqa"] = True
        elif not _groups_queries(query.device, query.dtype):
            each = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(each, 1), value.repeat_interleave(each, 1)
    longest = max(pieces.queries), max(pieces.keys)
    starts = pieces.query_starts, pieces.key_starts
    out: Tensor = varlen_attn(query.contiguous(), key.contiguous(), value.contiguous(), *starts, *longest, **options)
    return out


@cache
def _arguments() -> frozenset[str]:
    return frozenset(inspect.signature(varlen_attn).parameters)


@cache
def _groups_queries(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether more heads of queries than of keys give the right result although no argument allows it: tried."""
    inputs = [torch.randn(16, heads, 64, device=device, dtype=dtype, requires_grad=True) for heads in (4, 2, 2)]
    pieces = Pieces.of([16], 16, Alone(), device)
    causal: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in _arguments() else {"is_causal": True}
    rows = (pieces.query_starts, pieces.key_starts, 16, 16)
    results = []
    with torch.enable_grad():
        for each in (1, 2):
            query, key, value = inputs[0], *(x.repeat_interleave(each, 1) for x in inputs[1:])
            try:
                out = varlen_attn(query, key, value, *rows, **causal)
                results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
            except (RuntimeError, ValueError):
                return False
    return all(torch.allclose(a, b, rtol=0.05, atol=0.05) for a, b in zip(*results, strict=True))
