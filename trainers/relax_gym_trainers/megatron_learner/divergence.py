"""Divergence from a teacher over a vocabulary that tensor-parallel ranks share, never all logits at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from relax_gym_trainers.functional.distillation import EMPTY
from relax_gym_trainers.megatron_learner import compat  # noqa: F401  (before megatron)
from relax_gym_trainers.megatron_learner.logprobs import excluded_rows
from relax_gym_trainers.torch_learner.divergence import Form, Target, _HeadDivergence
from relax_gym_trainers.torch_learner.logprobs import Head, blocks, cut, fill, linear, slices

from megatron.core.tensor_parallel import (  # isort: skip
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedVocabulary:
    """A teacher's whole distribution: its hidden states [N, H], on any device, of the tokens `targets` [N], and this
    rank's rows of its head (`shared_head`). `form` sums over the vocabulary, so that ranks' sums add up.
    """

    features: Tensor
    targets: Tensor
    head: Head
    dtype: torch.dtype
    group: Any
    form: Form

    def rows(self, rows: slice) -> list[Tensor]:
        """The teacher's raw logits of this rank's ids, and the tokens."""
        weight = self.head.weight.to(self.dtype)
        return [linear(self.features[rows].to(weight), weight, None), self.targets[rows]]

    def compare(self, logprobs: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
        """Over the whole vocabulary."""
        raw, targets = given
        with torch.no_grad():
            log_q = shared_log_softmax(self.head.logits(raw)[0], group=self.group)
            sampled = _gathered(log_q, targets[:, None], self.group)[:, 0]
        return _summed(self.form(logprobs, log_q.to(logprobs)), self.group), sampled


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedTop:
    """A teacher's likeliest tokens: `ids` [N, K], `top` [N, K + 1] with the tail, `logprobs` [N] of the sampled one."""

    ids: Tensor
    top: Tensor
    logprobs: Tensor
    group: Any
    form: Form

    def rows(self, rows: slice) -> list[Tensor]:
        """Their part of each."""
        return [self.ids[rows], self.top[rows], self.logprobs[rows]]

    def compare(self, logprobs: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
        """Over the top, and the rest as one."""
        ids, top, sampled = given
        local, held = _held(ids, logprobs.shape[-1], self.group)
        times = torch.zeros_like(logprobs, dtype=torch.int8).scatter_add_(-1, local, held.to(torch.int8))
        tail = _logsumexp(logprobs.masked_fill(times > 0, EMPTY), self.group)
        selected = torch.cat([_gathered(logprobs, ids, self.group), tail], -1)
        return self.form(selected, top.to(logprobs)), sampled


def vocab_parallel_divergence(
    hidden: Tensor, head: Head, target: Target, *, group: Any, chunk: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Divergence of each token, differentiable in `hidden` and the head, and the teacher's log-prob of it, [N] each.

    As `vocab_parallel_logprobs`: every rank of the group calls it with the same tokens and gets the same, the gradient
    of `hidden` [N, H] is summed over the group, that of the weight is of this rank's rows.

    Args:
        head: This rank's rows (`shared_head`).
        target: A `SharedVocabulary` or a `SharedTop` of the N tokens.
        chunk: Tokens whose logits exist at one time.
        dtype: Precision of the product W h.
    """
    log_softmax = partial(shared_log_softmax, group=group)
    with torch.autocast(hidden.device.type, enabled=False):
        hidden = copy_to_tensor_model_parallel_region(hidden, group=group)
        arguments = (hidden, head.weight, None, head, dtype, chunk, target, log_softmax)
        compared: tuple[Tensor, Tensor] = _HeadDivergence.apply(*arguments)
    return compared


def shared_head(
    weight: Tensor, *, group: Any, temperature: float, vocabulary: int, never: Sequence[int] | None = None
) -> Head:
    """This rank's rows of a head, [V / tp, H], without padding from `vocabulary` on and without the ids `never`."""
    excluded = excluded_rows(len(weight), group, vocabulary, never, weight.device)
    return Head(weight=weight, bias=None, scale=1.0, softcap=None, temperature=temperature, never=excluded)


@torch.no_grad()
def shared_top(
    hidden: Tensor, targets: Tensor, head: Head, count: int, *, group: Any, chunk: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of the tokens `targets`, [N], and ids and log-probs of the likeliest tokens, [N, `count`] each.

    For the other arguments see `vocab_parallel_divergence`; every rank of the group gets the same.
    """
    values = hidden.new_empty(len(hidden), 1 + count, dtype=torch.promote_types(dtype, torch.float32))
    found = [values[:, 0], targets.new_empty(len(hidden), count), values[:, 1:]]
    weight = head.weight.to(dtype)
    for rows in slices(len(hidden), chunk):
        raw = None  # lets go of one chunk's logits before the next one's are there
        raw = linear(hidden[rows].to(dtype), weight, None)
        for part in blocks(raw):
            logprobs = shared_log_softmax(head.logits(raw[part])[0], group=group)
            sampled = _gathered(logprobs, targets[rows][part][:, None], group)[:, 0]
            fill(cut(found, rows), part, (sampled, *_likeliest(logprobs, count, group)))
    return found[0], found[1], found[2]


def _likeliest(logprobs: Tensor, count: int, group: Any) -> tuple[Tensor, Tensor]:
    """Ids and log-probs of the highest of all ranks' [n, V / tp] → [n, `count`] each."""
    top, ids = logprobs.topk(min(count, logprobs.shape[1]))
    ids = ids + group.rank() * logprobs.shape[1]
    if group.size() > 1:
        top, ids = (_side_by_side(values, group) for values in (top, ids))
    top, places = top.topk(count)
    return ids.gather(-1, places), top


def _side_by_side(values: Tensor, group: Any) -> Tensor:
    """All ranks' [n, K] → [n, tp · K]."""
    parts = [torch.empty_like(values) for _ in range(group.size())]
    dist.all_gather(parts, values.contiguous(), group=group)
    return torch.cat(parts, -1)


def shared_log_softmax(logits: Tensor, *, group: Any) -> Tensor:
    """This rank's logits → their log-probs among those of all ranks, [n, V / tp] each, differentiable."""
    normaliser: Tensor = copy_to_tensor_model_parallel_region(_logsumexp(logits, group), group=group)
    return logits - normaliser


def _logsumexp(values: Tensor, group: Any) -> Tensor:
    """Over all ranks' [n, V / tp] → [n, 1]."""
    peak = values.detach().amax(-1, keepdim=True).clamp_(min=torch.finfo(values.dtype).min)
    if group.size() > 1:
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
    return peak + _summed((values - peak).exp().sum(-1, keepdim=True), group).log()


def _gathered(values: Tensor, ids: Tensor, group: Any) -> Tensor:
    """All ranks' [n, V / tp] at the ids [n, K] → [n, K]."""
    local, held = _held(ids, values.shape[-1], group)
    return _summed(values.gather(-1, local).where(held, 0), group)


def _held(ids: Tensor, rows: int, group: Any) -> tuple[Tensor, Tensor]:
    """Where the ids are among this rank's, 0 where they are not; and whether they are."""
    local = ids - group.rank() * rows
    held = (local >= 0) & (local < rows)
    return local.where(held, 0), held


def _summed(values: Tensor, group: Any) -> Tensor:
    """The sum over ranks; each rank's share has the gradient of the sum."""
    summed: Tensor = reduce_from_tensor_model_parallel_region(values, group=group)
    return summed
