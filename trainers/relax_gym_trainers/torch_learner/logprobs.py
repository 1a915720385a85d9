"""Log-probs and entropies of the trained tokens, without ever holding the logits of all tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from relax_gym_trainers.device import add_product
from relax_gym_trainers.fused import fused

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger("relax_gym")

MIN_LOGIT = -1e5
"""Stands for a log-probability of -inf where it is multiplied by its probability, 0."""

BLOCK_ELEMENTS = 2**21
GPU_BLOCK_ELEMENTS = 2**28


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """From the last hidden state to logits at the sampling temperature: softcap(scale · (W h + b)) / temperature, and
    -inf for the ids `never`."""

    weight: Tensor
    bias: Tensor | None
    scale: float
    softcap: float | None
    temperature: float
    never: Tensor | None = None

    @classmethod
    def of(cls, model: PreTrainedModel, temperature: float) -> Head | None:
        """The head of a causal LM, or None when it is not a plain linear layer."""
        linear: Any = model.get_output_embeddings()
        if type(linear) is not torch.nn.Linear:
            return None
        config = model.config.get_text_config()
        scale = float(getattr(config, "logit_scale", None) or 1.0)
        scale /= float(getattr(config, "logits_scaling", None) or 1.0)
        softcap = getattr(config, "final_logit_softcapping", None)
        return cls(weight=linear.weight, bias=linear.bias, scale=scale, softcap=softcap, temperature=temperature)

    def logits(self, raw: Tensor) -> tuple[Tensor, Tensor | float]:
        """W h + b, [n, V] → logits in float32 or better, and their slope against W h + b.

        Leaves `raw` as it is; the logits are `raw` itself where they do not differ.
        """
        slope = self.scale / self.temperature
        same = self.softcap is None and slope == 1.0 and self.never is None
        logits = raw.to(torch.promote_types(raw.dtype, torch.float32), copy=not same)
        if self.softcap is None:
            return without(logits if same else logits.mul_(slope), self.never), slope
        capped = logits.mul_(self.scale / self.softcap).tanh_()
        logits = without(capped * (self.softcap / self.temperature), self.never)
        return logits, capped.square_().neg_().add_(1).mul_(slope)


class _HeadLogProbs(torch.autograd.Function):
    """(hidden [N, H], W [V, H], b [V]) → log-prob of the target and entropy, [N] each.

    The logits exist for `chunk` tokens at a time and are computed again in backward. It begins with the last chunk,
    whose logits are still there with `keep`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        head: Head,
        dtype: torch.dtype,
        chunk: int,
        keep: bool = True,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.head, ctx.dtype, ctx.chunk = head, dtype, chunk
        logprobs, entropy, normaliser = combine(*score_head(ctx, hidden, weight, bias, targets, keep))
        ctx.save_for_backward(hidden, weight, bias, targets, entropy, normaliser)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, *scores = ctx.saved_tensors
        values = (*scores, *grads, grads[0])
        into = backward_head(ctx, hidden, weight, bias, lambda rows: cut(values, rows), grad_block)
        return *into, None, None, None, None, None


def score_head(
    ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, keep: bool
) -> list[Tensor]:
    """What `reduce` gives for all rows, [N] each, in float32 or better; the logits exist for `ctx.chunk` at a time.

    `ctx.raw` has the last chunk's W h + b afterwards, or is None without `keep`.
    """
    weight_, hidden_ = weight.to(ctx.dtype), hidden.to(ctx.dtype)
    exact = torch.promote_types(ctx.dtype, torch.float32)
    scores = [hidden.new_empty(len(hidden), dtype=exact) for _ in range(4)]
    ctx.raw = None
    for rows in slices(len(hidden), ctx.chunk):
        ctx.raw = raw = None  # lets go of one chunk's logits before the next one's are there
        ctx.raw = raw = linear(hidden_[rows], weight_, bias)
        for part in blocks(raw):
            fill(cut(scores, rows), part, score_block(raw[part], ctx.head, targets[rows][part]))
    ctx.raw = ctx.raw if keep else None
    return scores


def backward_head(
    ctx: Any,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    values: Callable[[slice], Sequence[Any]],
    grad_block: Callable[..., None],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of hidden states, W and b, `ctx.chunk` tokens at a time, the last first: `ctx.raw` has its W h + b,
    or is None.

    `grad_block` takes some rows of W h + b, the head and those of `values`; it puts the rows' gradient in their place.
    """
    weight_, hidden_ = weight.to(ctx.dtype), hidden.to(ctx.dtype)
    grad_hidden = torch.empty_like(hidden)
    exact = torch.promote_types(weight.dtype, torch.float32)
    grad_weight = torch.zeros_like(weight, dtype=exact) if ctx.needs_input_grad[1] else None
    grad_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
    raw, ctx.raw = ctx.raw, None
    for rows in reversed(slices(len(hidden), ctx.chunk)):
        raw = linear(hidden_[rows], weight_, bias) if raw is None else raw
        _differentiate(raw, ctx.head, values(rows), grad_block, grad_bias)
        grad_hidden[rows] = (raw @ weight_).to(hidden.dtype)
        if grad_weight is not None:
            add_product(grad_weight, raw.T, hidden_[rows])
        raw = None  # lets go of one chunk's logits before the next one's are there
    return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), grad_bias


def without(logits: Tensor, never: Tensor | None) -> Tensor:
    """The logits, [n, V], themselves, those of the ids `never` at -inf."""
    return logits if never is None else logits.index_fill_(1, never.to(logits.device), -torch.inf)


def linear(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """W h + b for each row, in the precision of `hidden` and `weight`."""
    return torch.nn.functional.linear(hidden, weight, None if bias is None else bias.to(weight.dtype))


def _differentiate(
    raw: Tensor, head: Head, values: Sequence[Any], grad_block: Callable[..., None], grad_bias: Tensor | None
) -> None:
    """Put the gradient of W h + b, [n, V], in its place, and add that of b to `grad_bias`."""
    for part in blocks(raw):
        grad_block(raw[part], head, *cut(values, part))
    if grad_bias is not None:
        grad_bias += raw.sum(0, dtype=grad_bias.dtype)


def cut(values: Sequence[Any], rows: slice) -> list[Any]:
    """Those rows of each value that is not None."""
    return [None if value is None else value[rows] for value in values]


def fill(columns: Sequence[Tensor], part: slice, values: Sequence[Tensor]) -> None:
    """Write those rows of each column.

    Small tensors kept from each block would sit where large ones have been freed, and none of that could be used again:
    at 8,192 tokens and 150,000 entries of the vocabulary the heap grew to 9 GB.
    """
    for column, value in zip(columns, values, strict=True):
        column[part] = value


def slices(length: int, size: int) -> list[slice]:
    """`length` rows in pieces of at most `size`."""
    return [slice(start, start + size) for start in range(0, length, size)]


def blocks(raw: Tensor) -> list[slice]:
    """Rows of [n, V] in pieces that stay in a CPU's cache while they are gone over several times; on a GPU, where each
    piece costs launches, larger ones.
    """
    elements = BLOCK_ELEMENTS if raw.device.type == "cpu" else GPU_BLOCK_ELEMENTS
    return slices(len(raw), max(1, elements // raw.shape[1]))


@fused
def score_block(raw: Tensor, head: Head, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`reduce` of some rows of W h + b."""
    return reduce(head.logits(raw)[0], targets)


@fused
def grad_block(raw: Tensor, head: Head, *values: Any) -> None:
    """`_grad_logits` against W h + b, in the place of the latter's rows."""
    logits, slope = head.logits(raw)
    raw.copy_(_grad_logits(logits, *values).mul_(slope))


def reduce(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The whole vocabulary or a part of it, [n, V] and [n] → [n] each: the highest logit, the target's, and of the
    weights exp(logit − highest) their sum and their sum times logit − highest.
    """
    peak = logits.amax(-1, keepdim=True).clamp_(min=torch.finfo(logits.dtype).min)  # -inf where the whole part is
    chosen = logits.gather(-1, targets[:, None])
    shifted = logits - peak
    weights = shifted.exp()
    total = weights.sum(-1)
    # A logit of -inf (a masked entry of the vocabulary) has weight 0 and adds nothing; 0 · -inf would be NaN.
    return peak[:, 0], chosen[:, 0], total, weights.mul_(shifted.clamp_(min=MIN_LOGIT)).sum(-1)


def combine(peak: Tensor, chosen: Tensor, total: Tensor, mass: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What `reduce` gives of the whole vocabulary → log-prob of the target, entropy and log of the normaliser, [N]."""
    normaliser = peak + total.log()
    return chosen - normaliser, total.log() - mass / total, normaliser


def _grad_logits(
    logits: Tensor,
    targets: Tensor,
    entropy: Tensor,
    normaliser: Tensor,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    grad_chosen: Tensor | None,
) -> Tensor:
    """d/dlogits: g_c onehot − g_ℓ p − g_H p (log p + H), [n, V]. Overwrites `logits`.

    g_c is g_ℓ where the target is among these logits, else 0.
    """
    logits.sub_(normaliser[:, None])
    if grad_entropy is None:
        p = logits.exp_()
        p.mul_(torch.zeros_like(p[:, :1]) if grad_logprobs is None else -grad_logprobs[:, None])
    else:
        p = logits.exp()
        factor = logits.clamp_(min=MIN_LOGIT).add_(entropy[:, None]).mul_(-grad_entropy[:, None])
        p.mul_(factor if grad_logprobs is None else factor.sub_(grad_logprobs[:, None]))
    if grad_chosen is None:
        return p
    if torch.compiler.is_compiling():  # a scatter would be a kernel of its own, with all of p in memory before it
        ids = torch.arange(p.shape[1], device=p.device)
        return torch.where(ids == targets[:, None], p + grad_chosen[:, None], p)
    return p.scatter_add_(-1, targets[:, None], grad_chosen[:, None])
