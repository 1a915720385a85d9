"""Divergence of the policy from a teacher, without ever holding the logits of all tokens, of neither of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from relax_gym_trainers.functional import select_with_tail
from relax_gym_trainers.torch_learner.logprobs import Head, backward_head, blocks, cut, fill, linear, slices
from relax_gym_trainers.torch_learner.policy import Policy

Form = Callable[[Tensor, Tensor], Tensor]
"""Log-probs of policy and teacher, [n, V] each → divergence [n]."""


class Target(Protocol):
    """What a teacher says about N tokens."""

    def rows(self, rows: slice) -> list[Tensor]:
        """What `compare` needs to know of those tokens, each with one row for each."""
        ...

    def compare(self, logprobs: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
        """The policy's log-probs of n tokens, [n, V] → divergence and the teacher's log-prob of the token, [n] each."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FullVocabulary:
    """A teacher's `features` [N, H] of tokens `targets` [N]; its logits exist only for the rows asked for."""

    teacher: Policy
    features: Tensor
    targets: Tensor
    form: Form

    def rows(self, rows: slice) -> list[Tensor]:
        """The teacher's raw logits, and the tokens."""
        return [self.teacher.raw_logits(self.features[rows]), self.targets[rows]]

    def compare(self, logprobs: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
        """Over the whole vocabulary."""
        raw, targets = given
        log_q = self.teacher.logits(raw).log_softmax(-1)
        return self.form(logprobs, log_q.to(logprobs)), log_q.gather(-1, targets[:, None])[:, 0]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TopTokens:
    """A teacher's likeliest tokens: `ids` [N, K], `top` [N, K + 1] with the tail, `logprobs` [N] of the sampled one."""

    ids: Tensor
    top: Tensor
    logprobs: Tensor
    form: Form

    def rows(self, rows: slice) -> list[Tensor]:
        """Their part of each."""
        return [self.ids[rows], self.top[rows], self.logprobs[rows]]

    def compare(self, logprobs: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
        """Over the top, and the rest as one."""
        ids, top, sampled = given
        return self.form(select_with_tail(logprobs, ids), top.to(logprobs)), sampled


def compare_all(policy: Policy, features: Tensor, target: Target) -> tuple[Tensor, Tensor]:
    """Divergence of each token, [N], differentiable in `features` (see `Policy.features`) and the head; the teacher's
    log-prob of it, [N], a constant.
    """
    head = policy.head
    with torch.autocast(policy.device.type, enabled=False):
        if head is None:  # then the logits of all tokens exist anyway
            pieces = [
                target.compare(policy.logits(features[rows]).log_softmax(-1), *target.rows(rows))
                for rows in slices(len(features), policy.chunk)
            ]
            kl, sampled = (torch.cat(values) for values in zip(*pieces, strict=True))
            return kl, sampled
        arguments = (features, head.weight, head.bias, head, policy.head_dtype, policy.chunk, target)
        compared: tuple[Tensor, Tensor] = _HeadDivergence.apply(*arguments)
        return compared


def _log_softmax(logits: Tensor) -> Tensor:
    return logits.log_softmax(-1)


class _HeadDivergence(torch.autograd.Function):
    """(hidden [N, H], W [V, H], b [V]) → divergence and the teacher's log-prob of the sampled token, [N] each.

    The logits of policy and teacher exist for `chunk` tokens at a time and are computed again in backward.
    `log_softmax` makes log-probs of logits, [n, V] each, differentiable.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: Head,
        dtype: torch.dtype,
        chunk: int,
        target: Target,
        log_softmax: Callable[[Tensor], Tensor] = _log_softmax,
    ) -> tuple[Tensor, Tensor]:
        ctx.head, ctx.dtype, ctx.chunk, ctx.raw = head, dtype, chunk, None
        ctx.target, ctx.log_softmax = target, log_softmax
        weight_, hidden_ = weight.to(dtype), hidden.to(dtype)
        exact = torch.promote_types(dtype, torch.float32)
        value, sampled = found = [hidden.new_empty(len(hidden), dtype=exact) for _ in range(2)]
        for rows in slices(len(hidden), chunk):
            raw = given = None  # lets go of one chunk's logits before the next one's are there
            raw, given = linear(hidden_[rows], weight_, bias), target.rows(rows)
            for part in blocks(raw):
                logprobs = log_softmax(head.logits(raw[part])[0])
                fill(cut(found, rows), part, target.compare(logprobs, *cut(given, part)))
        ctx.save_for_backward(hidden, weight, bias)
        ctx.mark_non_differentiable(sampled)
        return value, sampled

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        def values(rows: slice) -> list[Tensor]:
            return [grads[0][rows], *ctx.target.rows(rows)]

        hidden, weight, bias = ctx.saved_tensors
        into = backward_head(ctx, hidden, weight, bias, values, partial(_grad_block, ctx.target, ctx.log_softmax))
        return *into, None, None, None, None, None


def _grad_block(
    target: Target, log_softmax: Callable[[Tensor], Tensor], raw: Tensor, head: Head, grad: Tensor, *given: Tensor
) -> None:
    logits, slope = head.logits(raw)
    logits = logits.detach().requires_grad_()  # they may be `raw` itself
    with torch.enable_grad():
        value, _ = target.compare(log_softmax(logits), *given)
    raw.copy_(torch.autograd.grad(value, logits, grad.to(value))[0].mul_(slope))
