"""Matrix products of consecutive runs of rows, each with a matrix of its own, in one kernel where torch has one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 16
"""Bytes that rows must be a multiple of for the kernel."""


def grouped_linear(x: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """The first counts[0] rows of x times weight[0]ᵀ, the next counts[1] times weight[1]ᵀ, …: [T, in] → [T, out].

    Args:
        weight: [groups, out, in]. A group of no rows gets a gradient of 0.
        counts: Rows of each group, T in all.
    """
    if len(counts) != len(weight) or sum(counts) != len(x):
        raise ValueError(f"{len(x)} rows and {len(weight)} matrices, but runs of {list(counts)} rows")
    product: Tensor = _GroupedLinear.apply(x, weight, list(counts))
    return product


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
        ctx.counts, ctx.ends = counts, None
        if len(x) and has_kernel(x, weight):
            ctx.ends = torch.tensor(list(accumulate(counts)), dtype=torch.int32).to(x.device, non_blocking=True)
        ctx.save_for_backward(x, weight)
        return _rows(x, weight.transpose(1, 2), counts, ctx.ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad = grads[0].contiguous()
        grad_x = _rows(grad, weight, ctx.counts, ctx.ends) if ctx.needs_input_grad[0] else None
        grad_weight = _outer(grad, x, ctx.counts, ctx.ends) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None


def has_kernel(x: Tensor, weight: Tensor) -> bool:
    """Whether torch multiplies these in one kernel: their device and precision can, and rows are aligned."""
    sizes = [size * x.element_size() for size in weight.shape[1:]]
    return x.dtype == weight.dtype and not any(n % _ALIGNMENT for n in sizes) and _multiplies(x.device, x.dtype)


@cache
def _multiplies(device: torch.device, dtype: torch.dtype) -> bool:
    """Tried: what `torch._grouped_mm` takes differs between releases and devices."""
    if not hasattr(torch, "_grouped_mm"):
        return False
    x, weight = torch.zeros(16, 16, device=device, dtype=dtype), torch.zeros(2, 16, 16, device=device, dtype=dtype)
    ends = torch.tensor([8, 16], dtype=torch.int32, device=device)
    try:
        torch._grouped_mm(x, weight.transpose(1, 2), offs=ends)
        torch._grouped_mm(x, weight, offs=ends)
        torch._grouped_mm(x.T, x, offs=ends)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _rows(x: Tensor, weight: Tensor, counts: list[int], ends: Tensor | None) -> Tensor:
    """[T, a], [groups, a, b] → [T, b]."""
    if ends is not None:
        out: Tensor = torch._grouped_mm(x, weight, offs=ends)
        return out
    out = x.new_empty(len(x), weight.shape[2])
    for run, matrix, into in zip(torch.split(x, counts), weight, torch.split(out, counts), strict=True):
        torch.mm(run, matrix, out=into)
    return out


def _outer(grad: Tensor, x: Tensor, counts: list[int], ends: Tensor | None) -> Tensor:
    """[T, out], [T, in] → [groups, out, in], 0 where a group has no rows."""
    if ends is None:
        out = x.new_empty(len(counts), grad.shape[1], x.shape[1])
        for run, of, into in zip(torch.split(grad, counts), torch.split(x, counts), out, strict=True):
            torch.mm(run.T, of, out=into)
        return out
    out = torch._grouped_mm(grad.T, x, offs=ends)
    for group, count in enumerate(counts):
        if not count:  # left as it was in memory on some devices and releases
            out[group].zero_()
    return out
