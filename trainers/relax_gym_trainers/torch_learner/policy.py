"""A causal LM as something that scores micro-batches: ids, positions, masks and media in, log-probs out."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax_gym.errors import ModelError, TrainingError
from relax_gym.processing import BIDIRECTIONAL, MediaProcessor
from relax_gym_trainers.device import upload
from relax_gym_trainers.torch_learner.logprobs import MIN_LOGIT, Head, _HeadLogProbs, linear, without
from relax_gym_trainers.torch_learner.packing import MicroBatch, check_placeholders
from relax_gym_trainers.torch_learner.replay import RouterReplay

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger("relax_gym")

PROBE_TOLERANCE = 1e-4
"""Largest relative difference of float32 logits that two ways to compute the same thing may have on the probe."""

MASKED_ATTENTION_COST = 16.0
"""How many times slower than a matrix product an operation of masked attention is; measured on a CPU, 8 to 30."""


class Policy:
    """A causal LM as something that scores micro-batches.

    The model stays in eval mode: dropout would make π/π_old compare dropout masks instead of policies. Only the dropout
    of adapters is on, and only where there is a gradient.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        temperature: float,
        dtype: torch.dtype,
        chunk: int,
        share_prefix: bool,
        processor: MediaProcessor | None = None,
        never_sampled: Sequence[int] = (),
    ) -> None:
        """`model` is the bare causal LM (adapters, if any, are inside it), `processor` what it reads media with; the
        ids `never_sampled` are in none of its distributions. Runs it twice on a few tokens."""
        self.model = model
        self.temperature = temperature
        self.dtype = dtype
        self.chunk = chunk
        self.backbone: Any = model.base_model
        self.processor = processor
        self._dropouts = [module for name, module in model.named_modules() if "lora_dropout" in name]
        accepted = inspect.signature(self.backbone.forward).parameters
        self.takes_positions = "position_ids" in accepted
        self._takes_types = "token_type_ids" in accepted and processor is not None
        self._never = torch.tensor(never_sampled) if never_sampled else None
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
        return self.read(self.features(batch), upload(batch.targets, self.device))

    def features(self, batch: MicroBatch) -> Tensor:
        """What the head reads to predict each trained token, [N, H]; without a head of ours the bare logits, [N, V]."""
        for module in self._dropouts:
            module.training = torch.is_grad_enabled()
        self.replay.use(batch, self.device)
        predictors = upload(batch.predictors, self.device)
        inputs = self._inputs(batch.ids, batch.positions, batch.segments, batch.branches) | self._media_inputs(batch)
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
            logits = raw.to(torch.promote_types(raw.dtype, torch.float32)) / self.temperature
            return without(logits, self._never)
        return self.head.logits(raw)[0]

    @property
    def head_dtype(self) -> torch.dtype:
        """Precision of the head's matrix product."""
        assert self.head is not None
        return self.dtype if self.head.weight.dtype == torch.float32 else self.head.weight.dtype

    def _inputs(self, ids: Any, positions: Any, segments: Any, branches: bool) -> dict[str, Any]:
        ids = upload(ids, self.device)
        if not branches:
            # Pads are on the right, where causal attention never looks from a real token.
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
        mask = tree_mask(upload(segments, self.device))
        if self.model.config._attn_implementation == "eager":
            dtype = self.model.dtype
            mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)
        positions = upload(positions, self.device)
        return {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "use_cache": False}

    def _media_inputs(self, batch: MicroBatch) -> dict[str, Tensor]:
        """What the model takes besides text: its encoders' inputs, position ids of several axes, token types.

        Raises:
            TrainingError: the ids have placeholders without their items, or the model reads text only.
        """
        processor = self.processor
        if processor is None:
            if batch.media:
                raise TrainingError(f"{type(self.model).__name__} reads text only, but samples have {batch.media[0]!r}")
            return {}
        check_placeholders(processor, batch.ids, batch.media)
        more: dict[str, Tensor] = {}
        if self._takes_types:
            more["token_type_ids"] = torch.from_numpy(np.stack([processor.token_types(row) for row in batch.ids]))
        if batch.media:
            more |= processor.inputs(batch.media)
            if processor.rope_index(self.model) is not None:
                more["position_ids"] = torch.from_numpy(self._axes(batch, processor))
        return {name: tensor.to(self.device) for name, tensor in more.items()}

    def _axes(self, batch: MicroBatch, processor: MediaProcessor) -> NDArray[np.number[Any]]:
        """Position ids [3, R, L] of each sample's own sequence."""
        found = [
            processor.positions(self.model, sample.token_ids, [placed.media for placed in sample.media])
            for sample in batch.members
        ]
        out = np.zeros((3, *batch.ids.shape), dtype=np.result_type(*found))
        own = iter(found)
        for line, (segments, members) in enumerate(zip(batch.segments, batch.row_sizes, strict=True)):
            for segment in range(1, members + 1):
                here = (segments == segment) | ((segments == 0) & (segment == 1))
                out[:, line, here] = next(own)[..., batch.positions[line, here]]
        return out

    def _attends_freely(self) -> bool:
        """Whether every layer attends to the whole context and takes a mask of ours."""
        config = self.model.config.get_text_config()
        kinds = getattr(config, "layer_types", None)
        windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
        full = all(kind == "full_attention" for kind in kinds) if kinds else not windowed
        chunked = getattr(config, "attention_chunk_size", None)
        known = config._attn_implementation in ("sdpa", "eager")
        joined = self.processor is not None and self.model.config.model_type in BIDIRECTIONAL
        return self.takes_positions and full and not chunked and known and not joined

    def _find_head(self) -> Head | None:
        """The model's head, or None and a warning where the logits are not known to be a function of `Head`'s kind."""
        head = Head.of(self.model, self.temperature)
        if head is not None and self._agrees(head):
            return dataclasses.replace(head, never=self._never)
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
