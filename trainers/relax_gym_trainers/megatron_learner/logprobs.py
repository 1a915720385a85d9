"""Log-probs and entropies of tokens over a vocabulary that tensor-parallel ranks share, never all logits at once."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from relax_gym_trainers.torch_learner.logprobs import (
    MIN_LOGIT,
    Head,
    backward_head,
    combine,
    cut,
    grad_block,
    score_head,
)


def vocab_parallel_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    group: Any = None,
    temperature: float,
    vocabulary: int,
    never: Sequence[int] | None = None,
    chunk: int,
    dtype: torch.dtype,
    scale: float = 1.0,
    softcap: float | None = None,
    keep: bool = True,
) -> tuple[Tensor, Tensor]:
    """log p of the targets and the entropy of p = softmax(softcap(scale · W h) / temperature), differentiable.

    Every rank of the group calls it with the same tokens, and gets the same. Under sequence parallelism the caller
    gathers the hidden states, with `gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)`:
    their gradient is already summed over the group here, so each rank's part of it is to be cut out and no more. The
    gradient of the weight is that of this rank's rows. Logits exist for `chunk` tokens at a time and are computed again
    in backward; beyond their product everything is float32 or better.

    Args:
        hidden: What the head reads to predict each token, [N, H]; N may be 0.
        weight: This rank's rows of the head, [V / tp, H]: rank r's are those of the ids from r · V / tp.
        targets: The tokens, [N] int64.
        group: The tensor-parallel group; None is this rank alone.
        vocabulary: True size; rows of the head from there on are padding and in no distribution.
        never: Ids that are never sampled: in no distribution, and with log-prob -inf.
        dtype: Precision of the product W h.
        scale: Factor of the logits.
        softcap: Bound c of the logits, c · tanh(logit / c), or None.
        keep: Keep the last chunk's logits for backward, which then begins with them.

    Returns:
        Log-probs and entropies in nats, [N] each, float32 or better; a target that no rank has gets -inf.

    Raises:
        ValueError: `vocabulary` is larger than the head.
    """
    if not 0 < vocabulary <= len(weight) * _size(group):
        rows = f"{_size(group)} · {len(weight)} rows"
        raise ValueError(f"a vocabulary of {vocabulary}, but the head has {rows}; give the tokenizer's own size")
    excluded = excluded_rows(len(weight), group, vocabulary, never, weight.device)
    head = Head(weight=weight, bias=None, scale=scale, softcap=softcap, temperature=temperature, never=excluded)
    with torch.autocast(hidden.device.type, enabled=False):
        scored: tuple[Tensor, Tensor] = _LogProbs.apply(hidden, weight, targets, head, dtype, chunk, group, keep)
    return scored


def excluded_rows(
    rows: int, group: Any, vocabulary: int, never: Sequence[int] | None, device: torch.device
) -> Tensor | None:
    """Which of this rank's rows of the head are padding or an id `never` sampled; None where there are none."""
    return _excluded(rows, _rank(group) * rows, vocabulary, tuple(never or ()), device)


@functools.lru_cache(maxsize=16)  # each micro-batch asks for the same
def _excluded(rows: int, start: int, vocabulary: int, never: tuple[int, ...], device: torch.device) -> Tensor | None:
    excluded = {*never, *range(vocabulary, start + rows)}
    mine = sorted(index - start for index in excluded if start <= index < start + rows)
    return torch.tensor(mine, device=device) if mine else None


class _LogProbs(torch.autograd.Function):
    """(hidden [N, H], W [V / tp, H]) → log-prob of the target and entropy, [N] each."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        head: Head,
        dtype: torch.dtype,
        chunk: int,
        group: Any,
        keep: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.head, ctx.dtype, ctx.chunk, ctx.group = head, dtype, chunk, group
        targets = targets - _rank(group) * len(weight)
        held = (targets >= 0) & (targets < len(weight))
        targets = targets.where(held, 0)
        peak, chosen, total, mass = score_head(ctx, hidden, weight, None, targets, keep)
        scores = _over_ranks(peak, chosen.where(held, -torch.inf), total, mass, group)
        logprobs, entropy, normaliser = combine(*scores)
        ctx.save_for_backward(hidden, weight, targets, held, entropy, normaliser)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, held, entropy, normaliser = ctx.saved_tensors
        chosen = None if grads[0] is None else grads[0].where(held, 0)
        values = (targets, entropy, normaliser, *grads, chosen)
        grad_hidden, grad_weight, _ = backward_head(
            ctx, hidden, weight, None, lambda rows: cut(values, rows), grad_block
        )
        if _size(ctx.group) > 1:
            dist.all_reduce(grad_hidden, group=ctx.group)
        return grad_hidden, grad_weight, *[None] * 6


def _over_ranks(peak: Tensor, chosen: Tensor, total: Tensor, mass: Tensor, group: Any) -> tuple[Tensor, ...]:
    """`reduce`d parts of the vocabulary → those of the whole, on each rank."""
    if _size(group) == 1:
        return peak, chosen, total, mass
    highest = torch.stack((peak, chosen))
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    lower = (peak - highest[0]).clamp_(min=MIN_LOGIT)
    factor = lower.exp()
    sums = torch.stack((total * factor, (mass + total * lower) * factor))
    dist.all_reduce(sums, group=group)
    return *highest, *sums


def _size(group: Any) -> int:
    return 1 if group is None else int(group.size())


def _rank(group: Any) -> int:
    return 0 if group is None else int(group.rank())
