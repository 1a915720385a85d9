"""Log-probs and entropies of the trained tokens, without ever holding the logits of all tokens."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from relax_gym.errors import ModelError
from relax_gym_trainers.torch_learner.packing import MicroBatch
from relax_gym_trainers.torch_learner.replay import RouterReplay

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger("relax_gym")

PROBE_TOLERANCE = 1e-4
"""Largest relative difference of float32 logits that two ways to compute the same thing may have on the probe."""

MASKED_ATTENTION_COST = 16.0
"""How many times slower than a matrix product an operation of masked attention is; measured on a CPU, 8 to 30."""

MIN_LOGIT = -1e5
"""Stands for a log-probability of -inf where it is multiplied by its probability, 0."""

BLOCK_ELEMENTS = 2**21


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """From the last hidden state to logits at the sampling temperature: softcap(scale · (W h + b)) / temperature."""

    weight: Tensor
    bias: Tensor | None
    scale: float
    softcap: float | None
    temperature: float

    @classmethod
    def of(cls, model: PreTrainedModel, temperature: float) -> Head | None:
        """The head of a causal LM, or None when it is not a plain linear layer."""
        linear: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
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
        same = self.softcap is None and slope == 1.0
        logits = raw.to(torch.promote_types(raw.dtype, torch.float32), copy=not same)
        if self.softcap is None:
            return (logits if same else logits.mul_(slope)), slope
        capped = logits.mul_(self.scale / self.softcap).tanh_()
        return capped * (self.softcap / self.temperature), capped.square_().neg_().add_(1).mul_(slope)


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
        weight_, hidden_ = weight.to(dtype), hidden.to(dtype)
        exact = torch.promote_types(dtype, torch.float32)
        logprobs, entropy, normaliser = scores = [hidden.new_empty(len(hidden), dtype=exact) for _ in range(3)]
        for rows in slices(len(hidden), chunk):
            ctx.raw = raw = None  # lets go of one chunk's logits before the next one's are there
            ctx.raw = raw = linear(hidden_[rows], weight_, bias)
            _score(raw, head, targets[rows], cut(scores, rows))
        ctx.raw = ctx.raw if keep else None
        ctx.save_for_backward(hidden, weight, bias, targets, entropy, normaliser)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, *scores = ctx.saved_tensors
        values = (*scores, *grads)
        into = backward_head(ctx, hidden, weight, bias, lambda rows: cut(values, rows), _grad_logits)
        return *into, None, None, None, None, None


def backward_head(
    ctx: Any,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    values: Callable[[slice], Sequence[Any]],
    grad_logits: Callable[..., Tensor],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of hidden states, W and b, `ctx.chunk` tokens at a time, the last first: `ctx.raw` has its W h + b,
    or is None.

    `grad_logits` takes some rows of the logits, which it may overwrite, and those of `values`; it gives their gradient.
    """
    weight_, hidden_ = weight.to(ctx.dtype), hidden.to(ctx.dtype)
    grad_hidden = torch.empty_like(hidden)
    grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
    grad_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
    raw, ctx.raw = ctx.raw, None
    for rows in reversed(slices(len(hidden), ctx.chunk)):
        raw = linear(hidden_[rows], weight_, bias) if raw is None else raw
        _differentiate(raw, ctx.head, values(rows), grad_logits, grad_bias)
        grad_hidden[rows] = (raw @ weight_).to(hidden.dtype)
        if grad_weight is not None:
            _add_product(grad_weight, raw.T, hidden_[rows])
        raw = None  # lets go of one chunk's logits before the next one's are there
    return grad_hidden, grad_weight, grad_bias


def linear(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """W h + b for each row, in the precision of `hidden` and `weight`."""
    return torch.nn.functional.linear(hidden, weight, None if bias is None else bias.to(weight.dtype))


def _score(raw: Tensor, head: Head, targets: Tensor, scores: Sequence[Tensor]) -> None:
    """Fill in what `_reduce` gives."""
    for part in blocks(raw):
        fill(scores, part, _reduce(head.logits(raw[part])[0], targets[part]))


def _differentiate(
    raw: Tensor, head: Head, values: Sequence[Any], grad_logits: Callable[..., Tensor], grad_bias: Tensor | None
) -> None:
    """Put the gradient of W h + b, [n, V], in its place, and add that of b to `grad_bias`."""
    for part in blocks(raw):
        block = raw[part]
        logits, slope = head.logits(block)
        grad = grad_logits(logits, *cut(values, part)).mul_(slope)
        block.copy_(grad)  # nothing to do where `grad` is `block`
        if grad_bias is not None:
            grad_bias += grad.sum(0).to(grad_bias.dtype)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


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
    """Rows of [n, V] in pieces that stay in the cache while they are gone over several times."""
    return slices(len(raw), max(1, BLOCK_ELEMENTS // raw.shape[1]))


def _reduce(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob of the target, entropy and log of the normaliser, [n, V] and [n] → [n] each."""
    peak = logits.amax(-1, keepdim=True)
    chosen = logits.gather(-1, targets[:, None])
    shifted = logits - peak
    weights = shifted.exp()
    total = weights.sum(-1)
    # A logit of -inf (a masked entry of the vocabulary) has weight 0 and adds nothing; 0 · -inf would be NaN.
    mean = weights.mul_(shifted.clamp_(min=MIN_LOGIT)).sum(-1) / total
    normaliser = peak[:, 0] + total.log()
    return chosen[:, 0] - normaliser, total.log() - mean, normaliser


def _grad_logits(
    logits: Tensor,
    targets: Tensor,
    entropy: Tensor,
    normaliser: Tensor,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
) -> Tensor:
    """d/dlogits: g_ℓ (onehot − p) − g_H p (log p + H), [n, V]. Overwrites `logits`."""
    logits.sub_(normaliser[:, None])
    if grad_entropy is None:
        p = logits.exp_()
        p.mul_(torch.zeros_like(p[:, :1]) if grad_logprobs is None else -grad_logprobs[:, None])
    else:
        p = logits.exp()
        factor = logits.clamp_(min=MIN_LOGIT).add_(entropy[:, None]).mul_(-grad_entropy[:, None])
        p.mul_(factor if grad_logprobs is None else factor.sub_(grad_logprobs[:, None]))
    return p if grad_logprobs is None else p.scatter_add_(-1, targets[:, None], grad_logprobs[:, None])


class Policy:
    """A causal LM as something that scores micro-batches.

    The model stays in eval mode: dropout would make π/π_old compare dropout masks instead of policies. Only the dropout
    of adapters is on, and only where there is a gradient.
    """

    def __init__(
        self, model: PreTrainedModel, *, temperature: float, dtype: torch.dtype, chunk: int, share_prefix: bool
    ) -> None:
        """`model` is the bare causal LM (adapters, if any, are inside it). Runs it twice on a few tokens."""
        self.model = model
        self.temperature = temperature
        self.dtype = dtype
        self.chunk = chunk
        self.backbone: Any = model.base_model
        self._dropouts = [module for name, module in model.named_modules() if "lora_dropout" in name]
        self.takes_positions = "position_ids" in inspect.signature(self.backbone.forward).parameters
        self.head = self._find_head()
        self.share_prefix = share_prefix and self._attends_freely() and self._branches_agree()
        self.replay = RouterReplay(model)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.model.parameters()).device

    @property
    def pair_cost(self) -> float:
        """What attention costs for one pair of tokens, in units of what one token costs outside attention."""
        if not self.share_prefix:
            return 0.0
        config = self.model.config.get_text_config()
        heads: int = config.num_attention_heads
        width: int = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
        weights: int = self.model.num_parameters() - config.vocab_size * config.hidden_size
        layers: int = config.num_hidden_layers
        return MASKED_ATTENTION_COST * 2 * layers * width / weights

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """Holds the low-precision copies of the weights for all `score` calls inside.

        The weights must not change inside, and calls with and without gradient must not share one: the copies made
        without gradient would cut the graph of those that follow.
        """
        with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32):
            yield

    def score(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-prob and entropy (nats, at the temperature) of each trained token, [N] each, float32 or better."""
        return self.read(self.features(batch), torch.from_numpy(batch.targets).to(self.device))

    def features(self, batch: MicroBatch) -> Tensor:
        """What the head reads to predict each trained token, [N, H]; without a head of ours the bare logits, [N, V]."""
        for module in self._dropouts:
            module.training = torch.is_grad_enabled()
        self.replay.use(batch, self.device)
        predictors = torch.from_numpy(batch.predictors).to(self.device)
        inputs = self._inputs(batch.ids, batch.positions, batch.segments, batch.branches)
        out = self.model(**inputs).logits if self.head is None else self.backbone(**inputs).last_hidden_state
        rows: Tensor = out.flatten(0, 1).index_select(0, predictors)
        return rows

    def read(self, features: Tensor, targets: Tensor, *, keep: bool = True) -> tuple[Tensor, Tensor]:
        """Log-prob of `targets` [N] and entropy, [N] each, from `features`.

        With `keep` one chunk's logits wait for backward; without, it computes them again, and others have the room.
        """
        with torch.autocast(self.device.type, enabled=False):
            if self.head is None:
                log_p = self.logits(features).log_softmax(-1)
                entropy = -(log_p.exp() * log_p.clamp(min=MIN_LOGIT)).sum(-1)
                return log_p.gather(-1, targets[:, None])[:, 0], entropy
            head = self.head
            arguments = (features, head.weight, head.bias, targets, head, self.head_dtype, self.chunk, keep)
            scored: tuple[Tensor, Tensor] = _HeadLogProbs.apply(*arguments)
            return scored

    def raw_logits(self, features: Tensor) -> Tensor:
        """What `logits` takes, [n, V], in the precision of the arithmetic. Call it for a few rows at a time."""
        if self.head is None:
            return features
        return linear(features.to(self.head_dtype), self.head.weight.to(self.head_dtype), self.head.bias)

    def logits(self, raw: Tensor) -> Tensor:
        """Logits at the temperature, [n, V], float32 or better."""
        if self.head is None:
            return raw.to(torch.promote_types(raw.dtype, torch.float32)) / self.temperature
        return self.head.logits(raw)[0]

    @property
    def head_dtype(self) -> torch.dtype:
        """Precision of the head's matrix product."""
        assert self.head is not None
        return self.dtype if self.head.weight.dtype == torch.float32 else self.head.weight.dtype

    def _inputs(self, ids: Any, positions: Any, segments: Any, branches: bool) -> dict[str, Any]:
        ids = torch.from_numpy(ids).to(self.device)
        if not branches:
            # Pads are on the right, where causal attention never looks from a real token.
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
        mask = tree_mask(torch.from_numpy(segments).to(self.device))
        if self.model.config._attn_implementation == "eager":
            dtype = self.model.dtype
            mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)
        positions = torch.from_numpy(positions).to(self.device)
        return {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "use_cache": False}

    def _attends_freely(self) -> bool:
        """Whether every layer attends to the whole context and takes a mask of ours."""
        config = self.model.config.get_text_config()
        kinds = getattr(config, "layer_types", None)
        windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
        full = all(kind == "full_attention" for kind in kinds) if kinds else not windowed
        chunked = getattr(config, "attention_chunk_size", None)
        known = config._attn_implementation in ("sdpa", "eager")
        return self.takes_positions and full and not chunked and known

    def _find_head(self) -> Head | None:
        """The model's head, or None and a warning where the logits are not known to be a function of `Head`'s kind."""
        head = Head.of(self.model, self.temperature)
        if head is not None and self._agrees(head):
            return head
        log.warning(
            "%s has %s: all logits of a micro-batch exist at once, several times over, instead of those of %d tokens; "
            "lower learner.micro_batch_tokens if memory runs out",
            type(self.model).__name__,
            "an output layer that is no plain torch.nn.Linear" if head is None else "logits that are not W h + b",
            self.chunk,
        )
        return None

    @torch.no_grad()
    def _agrees(self, head: Head) -> bool:
        """Whether hidden states through `head` are the model's own logits."""
        inputs = self._inputs(np.arange(1, 9)[None] % self.model.config.get_text_config().vocab_size, None, None, False)
        expected = self.model(**inputs).logits.float() / self.temperature
        hidden = self.backbone(**inputs).last_hidden_state.to(head.weight.dtype)
        got, _ = head.logits(linear(hidden, head.weight, head.bias))
        return got.shape == expected.shape and _close(got.float(), expected)

    @torch.no_grad()
    def _branches_agree(self) -> bool:
        """Whether a prompt and two answers in one row give what each answer alone gives."""
        vocabulary = self.model.config.get_text_config().vocab_size
        ids = np.array([[1, 2, 3, 4, 5, 6, 7, 8]]) % vocabulary
        positions, segments = np.array([[0, 1, 2, 3, 4, 3, 4, 5]]), np.array([[0, 0, 0, 1, 1, 2, 2, 2]])
        alone = self._inputs(ids[:, [0, 1, 2, 5, 6, 7]], None, None, False)
        expected = self.backbone(**alone).last_hidden_state[:, -1].float()
        try:
            got = self.backbone(**self._inputs(ids, positions, segments, True)).last_hidden_state[:, -1].float()
        except (IndexError, RuntimeError, TypeError, ValueError):
            return False  # the model takes no mask of ours; the plain path, which it has just run, is as exact
        return _close(got, expected)


def _close(got: Tensor, expected: Tensor) -> bool:
    if not bool(expected.isfinite().all()):
        raise ModelError("the model gives non-finite numbers on a plain prompt; its weights are broken")
    return bool((got - expected).abs().max() <= PROBE_TOLERANCE * expected.abs().max())


def tree_mask(segments: Tensor) -> Tensor:
    """Segments [R, L] → who sees whom, bool [R, 1, L (query), L (key)]: earlier tokens of segment 0 and one's own."""
    query, key = segments[:, :, None], segments[:, None, :]
    order = torch.arange(segments.shape[1], device=segments.device)
    return (((key == 0) | (key == query)) & (order[None, :, None] >= order[None, None, :]))[:, None]
