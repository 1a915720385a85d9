"""A Hugging Face causal language model behind two calls: prefill a padded block, decode one token for each row."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from relax_gym.errors import SamplerError
from relax_gym.models import THINKER
from relax_gym.processing import BIDIRECTIONAL, MediaProcessor
from relax_gym.types import Placed
from relax_gym_plugins.samplers.local.cache import ShapeProbe, SlotCache, pages
from relax_gym_plugins.samplers.local.contexts import Context, Ids, Positions
from relax_gym_plugins.samplers.local.names import checkpoint_views
from relax_gym_plugins.samplers.local.packing import PackedLinears

FULL, SLIDING = "full_attention", "sliding_attention"


class ModelRunner:
    """Runs the model on the rows of a `SlotCache`."""

    def __init__(
        self, model: PreTrainedModel, processor: MediaProcessor | None, *, max_rows: int, max_length: int
    ) -> None:
        self.model, self._processor = model, processor
        self.model.train(False)
        self.device, self.dtype = model.device, model.dtype
        self._packed = PackedLinears(model)
        self.vocab_size = int(model.config.get_text_config().vocab_size)
        accepted = inspect.signature(model.forward).parameters
        if "position_ids" not in accepted:
            raise SamplerError(f"{type(model).__name__} takes no position_ids; the local sampler cannot batch it")
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"
        self._extra: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._windows, self._by_layer_type = attention_windows(model.config.get_text_config())
        self.cache = SlotCache(
            self._probe(), max_rows=max_rows, max_length=max_length, dtype=self.dtype, device=self.device
        )

    @torch.inference_mode()
    def _probe(self) -> dict[int, tuple[tuple[int, int], tuple[int, int]]]:
        probe = ShapeProbe()
        zero = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        self._forward(zero, zero, probe, span=1)
        if not probe.shapes:
            raise SamplerError(f"{type(self.model).__name__} does not use its cache; the local sampler needs one")
        return probe.shapes

    def decode(self, contexts: Sequence[Context]) -> Tensor:
        """Logits [n, vocabulary] after the last id of each context; context i must own row i and miss one id."""
        positions = np.array([context.cached for context in contexts])
        tokens = np.array([context.ids[context.cached] for context in contexts])
        span = pages(int(positions.max()) + 1)
        self.cache.reserve(len(contexts), span)
        where = torch.from_numpy(positions).to(self.device)
        self.cache.plan_decode(where, span)
        block = torch.from_numpy(tokens).to(self.device).unsqueeze(1)
        pieces = [(context, 1) for context in contexts]
        return self._forward(block, where.unsqueeze(1), self.cache, span, position_ids=self._position_ids(pieces, 1))

    def prefill(self, batch: Sequence[tuple[Context, int]]) -> Tensor:
        """Run the next `size` missing ids of each context; logits [n, vocabulary] after the last of them.

        The block is padded on the left, so that the logits needed are those of its last column.
        """
        width = max(size for _, size in batch)
        tokens = np.zeros((len(batch), width), dtype=np.int64)
        positions = np.zeros_like(tokens)
        for line, (context, size) in enumerate(batch):
            start = context.cached
            tokens[line, width - size :] = context.ids[start : start + size]
            positions[line, width - size :] = np.arange(start, start + size)
        rows = np.array([context.row for context, _ in batch])
        span = pages(int(positions.max()) + 1)
        self.cache.reserve(int(rows.max()) + 1, span)
        real = np.arange(width) >= width - np.array([size for _, size in batch])[:, None]
        slots = (rows[:, None] * self.cache.length + positions)[real]
        self.cache.plan_prefill(
            torch.from_numpy(rows).to(self.device),
            torch.from_numpy(slots).to(self.device),
            torch.from_numpy(np.flatnonzero(real)).to(self.device),
            span,
        )
        block, where = torch.from_numpy(tokens).to(self.device), torch.from_numpy(positions).to(self.device)
        return self._forward(
            block,
            where,
            self.cache,
            span,
            position_ids=self._position_ids(batch, width),
            joined=self._joined(batch, width),
            media=self._media(batch),
        )

    def positions(self, prompt: Ids, media: Sequence[Placed]) -> Positions | None:
        """Position ids of a prompt, [axes, length]; None when they are 0, 1, 2, …

        Raises:
            MediaError: the prompt has placeholders without an item, or items without placeholders.
        """
        if self._processor is None:
            return None
        self._processor.place(prompt, [placed.media for placed in media])
        found = self._processor.positions(self.model, prompt, [placed.media for placed in media])
        return found if found.ndim == 2 else None

    def _position_ids(self, batch: Sequence[tuple[Context, int]], width: int) -> Tensor:
        """[b, q], or [axes, b, q] when some context has positions along several axes."""
        given = [context.positions_of(context.cached, context.cached + size) for context, size in batch]
        axes = max(len(part) for part in given)
        out = np.zeros((axes, len(batch), width), dtype=np.result_type(*given))
        for line, part in enumerate(given):
            out[:, line, width - part.shape[1] :] = part
        ids = torch.from_numpy(out).to(self.device)
        return ids if axes > 1 else ids[0]

    def _media(self, batch: Sequence[tuple[Context, int]]) -> dict[str, Tensor]:
        """What the model's encoders read for the items in these pieces."""
        items = [placed.media for c, size in batch for placed in c.media_in(c.cached, c.cached + size)]
        if not items:
            return {}
        assert self._processor is not None, "a prompt with media has passed `positions`"
        return {key: self._cast(tensor) for key, tensor in self._processor.inputs(items).items()}

    def _cast(self, tensor: Tensor) -> Tensor:
        """Features in the precision of the model; what has one axis is a time or a number, and stays exact."""
        return tensor.to(self.device, self.dtype if tensor.is_floating_point() and tensor.ndim > 1 else None)

    def _joined(self, batch: Sequence[tuple[Context, int]], width: int) -> tuple[Tensor, Tensor] | None:
        """Half-open ranges that each token of a block also sees, [b, q] each, in models whose images see themselves."""
        if self.model.config.model_type not in BIDIRECTIONAL or not any(context.media for context, _ in batch):
            return None
        assert self._processor is not None
        first, last = np.full((2, len(batch), width), [[[2**31]], [[0]]], dtype=np.int64)
        for line, (context, size) in enumerate(batch):
            start, end = runs(np.isin(context.ids[: context.length], self._processor.placeholder_ids))
            here = slice(context.cached, context.cached + size)
            first[line, width - size :], last[line, width - size :] = start[here], end[here]
        return torch.from_numpy(first).to(self.device), torch.from_numpy(last).to(self.device)

    def _forward(
        self,
        tokens: Tensor,
        where: Tensor,
        cache: Any,
        span: int,
        *,
        position_ids: Tensor | None = None,
        joined: tuple[Tensor, Tensor] | None = None,
        media: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        masks = {kind: self._mask(where, span, window, joined) for kind, window in self._windows.items()}
        output = self.model(
            input_ids=tokens,
            attention_mask=masks if self._by_layer_type else next(iter(masks.values())),
            position_ids=where if position_ids is None else position_ids,
            use_cache=True,
            **{self._cache_name: cache},
            **self._extra,
            **(media or {}),
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def _mask(self, where: Tensor, span: int, window: int | None, joined: tuple[Tensor, Tensor] | None) -> Tensor:
        """Additive [b, 1, q, span]. The lowest finite number and not -inf: eager attention must not make NaN of it."""
        columns = torch.arange(span, device=self.device)
        rows = where.unsqueeze(-1)
        hidden = columns > rows
        if window is not None:
            hidden |= columns <= rows - window
        if joined is not None:
            first, last = joined
            hidden &= (columns < first.unsqueeze(-1)) | (columns >= last.unsqueeze(-1))
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(hidden, torch.finfo(self.dtype).min).unsqueeze(1)

    @torch.inference_mode()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Copy tensors into the model by name. Nothing is copied unless all names and shapes are right.

        Raises:
            SamplerError: names the missing, unknown or misshapen tensors.
        """
        weights = {name.removeprefix(THINKER): tensor for name, tensor in weights.items()}
        state = self.model.state_dict(keep_vars=True)
        own, whole = dict(state), {name: name for name in state}
        for name, stacked, view in checkpoint_views(state):
            own[name], whole[name] = view, stacked
        unknown = sorted(weights.keys() - own.keys())
        given = Counter[int]()
        for name in weights.keys() - set(unknown):
            given[id(state[whole[name]])] += own[name].numel()
        missing = [name for name, p in self.model.named_parameters() if given[id(p)] < p.numel()]
        if unknown or missing:
            raise SamplerError(
                f"weights do not fit {type(self.model).__name__}: missing {_some(missing)}; unknown {_some(unknown)}; "
                "give every parameter under its Hugging Face name, tied ones once, experts stacked or each by itself"
            )
        for name, tensor in weights.items():
            if tensor.shape != own[name].shape:
                raise SamplerError(
                    f"weight {name!r} has shape {tuple(tensor.shape)}; the model's is {tuple(own[name].shape)}"
                )
        for name, tensor in weights.items():
            own[name].copy_(tensor)
        self._packed.refresh()


def attention_windows(config: Any) -> tuple[dict[str, int | None], bool]:
    """The sliding window (None: all) of each kind of layer, and whether the model takes masks by layer type.

    Raises:
        SamplerError: the model has layers that are neither full nor sliding-window attention.
    """
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    if unknown := sorted(kinds - {FULL, SLIDING}):
        raise SamplerError(
            f"{config.model_type} has layers of type {', '.join(unknown)}; the local sampler knows {FULL} and {SLIDING}"
        )
    if SLIDING in kinds:
        return {FULL: None, SLIDING: window}, True
    if kinds or not getattr(config, "use_sliding_window", True):
        window = None
    return {FULL: window}, False


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:8]) or "none"
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"


def runs(members: NDArray[np.bool_]) -> tuple[Ids, Ids]:
    """For each place in a run of members where it begins and ends (half-open); an empty range elsewhere."""
    padded = np.concatenate([[False], members, [False]])
    starts, ends = np.flatnonzero(padded[1:] & ~padded[:-1]), np.flatnonzero(padded[:-1] & ~padded[1:])
    first, last = np.full(len(members), 2**31), np.zeros(len(members), dtype=np.int64)
    for start, end in zip(starts, ends, strict=True):
        first[start:end], last[start:end] = start, end
    return first, last
