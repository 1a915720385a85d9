"""What turns images, videos and audio into embeddings: the encoders of `transformers`, in front of Megatron's decoder.

The model's own class says how: it runs with its encoders, on the placeholders alone, and what takes its decoder's place
keeps what the decoder would have been given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from relax_gym.errors import ConfigError
from relax_gym.models import empty_language_model
from relax_gym.processing import MediaProcessor
from relax_gym_trainers.device import upload
from relax_gym_trainers.megatron_learner.batches import ContextShare, PackedBatch
from relax_gym_trainers.megatron_learner.families import family_of
from relax_gym_trainers.torch_learner.packing import check_placeholders


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MediaInputs:
    """The media of a micro-batch, for one context-parallel rank.

    Attributes:
        ids: Of all n placeholders of the micro-batch, in order.
        tensors: What the encoders take.
        rows: Which of this rank's tokens are placeholders, [k].
        which: Which of the n each of them is, [k].
    """

    ids: Tensor
    tensors: Mapping[str, Tensor]
    rows: Tensor
    which: Tensor

    def within(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """`rows`, counted from `first`, and `which`, of those among `count` tokens from there."""
        inside = (self.rows >= first) & (self.rows < first + count)
        return self.rows[inside] - first, self.which[inside]


class MediaReader:
    """What every rank must know of a model that reads media: positions on several axes, what the encoders take."""

    def __init__(self, processor: MediaProcessor, whole: PretrainedConfig) -> None:
        """`whole` is the config of the folder."""
        self.processor, self._model = processor, empty_language_model(whole)

    def laid_out(self, batch: PackedBatch) -> PackedBatch:
        """The micro-batch with positions [3, T] if it has media and the model has such.

        Raises:
            TrainingError: the ids have placeholders without their items, or the other way round.
        """
        check_placeholders(self.processor, batch.ids, batch.media)
        if not batch.media or self.processor.rope_index(self._model) is None:
            return batch
        axes = []
        for start, end, sample in zip(batch.cu_seqlens, batch.cu_seqlens[1:], batch.members, strict=False):
            media = [placed.media for placed in sample.media]
            own = np.broadcast_to(
                self.processor.positions(self._model, sample.token_ids, media), (3, len(sample.token_ids))
            )
            axes.append(own[:, np.minimum(np.arange(end - start), own.shape[1] - 1)])  # any for the pads
        return replace(batch, positions=np.concatenate(axes, axis=1))

    def inputs(self, batch: PackedBatch, share: ContextShare, device: torch.device) -> MediaInputs | None:
        """None without media."""
        if not batch.media:
            return None
        present = np.isin(batch.ids, self.processor.placeholder_ids)
        rows = np.flatnonzero(present[share.tokens])
        which = (np.cumsum(present) - 1)[share.tokens[rows]]
        own = {"ids": batch.ids[present], "rows": rows, "which": which}
        return MediaInputs(
            tensors={name: tensor.to(device) for name, tensor in self.processor.inputs(batch.media).items()},
            **{name: upload(array, device) for name, array in own.items()},
        )


class Towers(nn.Module):
    """The encoders of a model, each under its name there. They stay in eval mode."""

    def __init__(
        self, whole: PretrainedConfig, names: Sequence[str], width: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Not filled. `width` is the decoder's."""
        super().__init__()
        shell = empty_language_model(whole)
        self._decoder = [_Decoder(width, dtype)]
        self._shell = [shell.eval()]  # in a list: what is left of it has parameters of no device
        _put(shell, shell.get_decoder(), self._decoder[0])
        _put(shell, shell.get_output_embeddings(), nn.Identity())
        for name in names:
            blank: Any = next(module for path, module in shell.named_modules() if path.rpartition(".")[2] == name)
            with device:
                tower = type(blank)._from_config(blank.config, dtype=dtype).eval()
            _put(shell, blank, tower)
            self.add_module(name, tower)

    def train(self, mode: bool = True) -> Towers:
        """Dropout would make π/π_old compare dropout masks instead of policies."""
        return self

    def forward(self, media: MediaInputs) -> tuple[Tensor, list[Tensor]]:
        """Embeddings of all n placeholders, [n, width], and what is added to the hidden states after the first decoder
        layers, [n, width] for each."""
        dtype = next(self.parameters()).dtype
        tensors = {
            name: tensor.to(dtype) if name.startswith(("pixel_values", "input_features")) else tensor
            for name, tensor in media.tensors.items()
        }
        ids, decoder = media.ids[None], self._decoder[0]
        # Positions only so that nobody computes them, which these ids would not do for.
        given = {"attention_mask": torch.ones_like(ids), "position_ids": ids.new_zeros(3, *ids.shape)}
        features: Tensor = self._shell[0](input_ids=ids, use_cache=False, **given, **tensors).logits[0]
        deep, decoder.deep = decoder.deep, []
        return features, deep


class _Decoder(nn.Module):
    """In a decoder's place: gives its inputs back, and keeps what is for its layers."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed_tokens = _Zeros(width, dtype)
        self.deep: list[Tensor] = []

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def forward(
        self,
        inputs_embeds: Tensor,
        visual_pos_masks: Tensor | None = None,
        deepstack_visual_embeds: Sequence[Tensor] | None = None,
        **_: Any,
    ) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPast

        self.deep = []
        if visual_pos_masks is not None:
            (seen,) = visual_pos_masks[0].nonzero(as_tuple=True)
            blank = torch.zeros_like(inputs_embeds[0])
            self.deep = [blank.index_copy(0, seen, one.to(blank)) for one in deepstack_visual_embeds or ()]
        return BaseModelOutputWithPast(last_hidden_state=cast(Any, inputs_embeds))


class _Zeros(nn.Module):
    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.width, self.dtype = width, dtype

    def forward(self, ids: Tensor) -> Tensor:
        return torch.zeros(*ids.shape, self.width, dtype=self.dtype, device=ids.device)


def _put(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """`new` in the place of `old`."""
    path = next(path for path, module in model.named_modules() if module is old)
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, new)


# Features for decoder layers ------------------------------------------------------------------------------------------


class DeepStack:
    """Features added to the hidden states of some tokens after the first decoder layers.

    Their gradient goes around the layers, which may be computed again in backward: each addition leaves it here, and
    the layers' input, whose gradient comes last, hands it on.
    """

    def __init__(self, rows: Tensor, features: Tensor) -> None:
        """`features` [layers, k, hidden] of the tokens `rows` [k]."""
        self.rows, self.features = rows, features
        self.grads = [torch.zeros_like(one) for one in features.detach()] if features.requires_grad else []

    def begin(self, hidden: Tensor) -> Tensor:
        """What goes into the first layer, [t, 1, hidden]."""
        begun: Tensor = _HandOn.apply(hidden, self.features, self)
        self.features = self.features.detach()
        return begun

    def add(self, layer: int, hidden: Tensor) -> Tensor:
        """What comes out of a layer, counted from 0."""
        if layer >= len(self.features):
            return hidden
        added: Tensor = _Add.apply(hidden, self, layer)
        return added


class _HandOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, features: Tensor, stack: DeepStack) -> Tensor:
        ctx.stack = stack
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        return grads[0], torch.stack(ctx.stack.grads) if ctx.stack.grads else None, None


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, stack: DeepStack, layer: int) -> Tensor:
        ctx.stack, ctx.layer = stack, layer
        return hidden.index_add(0, stack.rows, stack.features[layer][:, None].to(hidden))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        if ctx.stack.grads:
            ctx.stack.grads[ctx.layer] = grads[0][ctx.stack.rows, 0]
        return grads[0], None, None


def keep_deep_stack(layers: Sequence[nn.Module]) -> None:
    """Make decoder layers add what the `deep_stack` of their pack has for them."""
    for number, layer in enumerate(layers):

        def add(_: Any, args: Any, given: dict[str, Any], out: Any, number: int = number) -> Any:
            stack: DeepStack | None = getattr(given["packed_seq_params"], "deep_stack", None)
            return out if stack is None else (stack.add(number, out[0]), *out[1:])

        layer.register_forward_hook(add, with_kwargs=True)


def text_config(whole: PretrainedConfig) -> PretrainedConfig:
    """The decoder's part of a folder's config; embeddings and head are tied as the whole says."""
    text = whole.get_text_config()
    text.tie_word_embeddings = whole.tie_word_embeddings
    return text


def freeze_encoders(chunks: Sequence[Any], text: PretrainedConfig) -> None:
    """Train the decoder only. Raises ConfigError when the model has no encoder."""
    check_encoders(text)
    for chunk in chunks:
        if chunk.towers is not None:
            chunk.towers.requires_grad_(False)


def check_encoders(text: PretrainedConfig) -> None:
    """Raises ConfigError when a model of this text config has no encoder."""
    if not family_of(text).towers:
        raise ConfigError(
            f"learner.freeze_encoders = true, but {text.model_type} models have no encoder of images, video or audio"
        )


def check_deep_stack(whole: PretrainedConfig, layers: int) -> int:
    """How many layers of the first chunk, of `layers`, are given features.

    Raises:
        ConfigError: not all of them are in the first chunk.
    """
    vision = getattr(whole, "vision_config", None)
    deep = len(getattr(vision, "deepstack_visual_indexes", None) or ())
    if deep > layers:
        raise ConfigError(
            f"{whole.model_type} models give features of images to their first {deep} layers, but the first pipeline "
            f"stage has {layers}; lower learner.pp or learner.vpp"
        )
    return deep
