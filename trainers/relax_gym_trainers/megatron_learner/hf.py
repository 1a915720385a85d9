"""Weights from a Hugging Face model folder into any layout, and from any layout under the hub's names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from relax_gym.errors import ModelError
from relax_gym.models import language_prefix
from relax_gym_trainers.megatron_learner import compat  # noqa: F401  (before megatron)
from relax_gym_trainers.megatron_learner.families import family_of
from relax_gym_trainers.megatron_learner.families.base import OUTPUT, Rule, number_of_experts, sizes
from relax_gym_trainers.megatron_learner.families.forms import Vocabulary
from relax_gym_trainers.megatron_learner.modules.adapters import Adapted, adapted, of_adapter
from relax_gym_trainers.megatron_learner.modules.experts import unstacked
from relax_gym_trainers.model_folder import Checkpoint

from megatron.core import parallel_state  # isort: skip

UNUSED = re.compile(r"\.rotary_emb\.inv_freq$")
"""Tensors of old checkpoints that the config determines."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a parameter is in the whole model."""

    rule: Rule
    layer: int = 0
    expert: int = 0
    rest: str = ""

    @property
    def hub(self) -> tuple[str, ...]:
        return tuple(name.format(layer=self.layer, expert=self.expert, rest=self.rest) for name in self.rule.hub)


def unwrapped(chunk: Any) -> Any:
    """The model in Megatron's wrappers (data parallel, mixed precision)."""
    while not hasattr(chunk, "decoder"):
        chunk = chunk.module
    return chunk


def places(chunk: Any, config: PretrainedConfig) -> Iterator[tuple[str, Tensor, Place]]:
    """(name, parameter, place) of each parameter of a chunk of this rank but adapters, in the order of the model; each
    expert apart.

    Raises:
        ModelError: the family has no rule for one.
    """
    patterns = [(_pattern(rule), rule) for rule in family_of(config).rules]
    model = unwrapped(chunk)
    for name, parameter in unstacked(model.named_parameters()):
        if of_adapter(name):
            continue
        for pattern, rule in patterns:
            if found := pattern.fullmatch(name):
                layer, expert = (int(found.groupdict().get(key) or 0) for key in ("layer", "expert"))
                if "layer" in found.groupdict():
                    layer = model.decoder.layers[layer].layer_number - 1
                if rule.of_experts:
                    experts = model.config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
                    expert += experts * parallel_state.get_expert_model_parallel_rank()
                yield name, parameter, Place(rule, layer, expert, found.groupdict().get("rest", ""))
                break
        else:
            raise ModelError(f"the family of {config.model_type} models has no rule for {name}")


def _pattern(rule: Rule) -> re.Pattern[str]:
    text = re.escape(rule.megatron)
    for key, form in (("layer", "[0-9]+"), ("expert", "[0-9]+"), ("rest", ".+")):
        text = text.replace(re.escape("{" + key + "}"), f"(?P<{key}>{form})")
    return re.compile(text)


def tensor_group(rule: Rule) -> Any:
    """The ranks that share a parameter."""
    if rule.of_experts:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def known_tensors(folder: Path, config: PretrainedConfig) -> Checkpoint:
    """The tensors of a folder, unread.

    Args:
        config: The text config of the folder.

    Raises:
        ModelError: one is none that the family knows.
    """
    checkpoint = Checkpoint(folder, language_prefix(folder))
    family = family_of(config)
    known = {name for *_, names in family.hub_names(config) for name in names} | set(OUTPUT.hub)
    modules = tuple(rule.hub[0].removesuffix("{rest}") for rule in family.rules if rule.of_module)
    others = (name for name in checkpoint.files if name not in known and not name.startswith(modules))
    if strange := sorted(name for name in others if not UNUSED.search(name)):
        raise ModelError(
            f"{folder} has {len(strange)} tensors that a {config.model_type} model does not, as {strange[0]!r}; "
            "use the torch learner"
        )
    return checkpoint


@torch.no_grad()
def load(chunks: Sequence[Any], folder: Path, config: PretrainedConfig, *, surplus: int = 0) -> None:
    """Fill this rank's parameters; each rank reads only its parts.

    Args:
        config: The text config of the folder.
        surplus: Rows of the vocabulary that the folder has beyond `config.vocab_size`; they are left out.

    Raises:
        ModelError: a tensor is missing, has another size than the config says, or is none that the family knows; or
            the config ties a head that the folder has apart.
    """
    checkpoint, family = known_tensors(folder, config), family_of(config)
    _check_tied(checkpoint, config)
    for name, parameter, place in (found for chunk in chunks for found in places(chunk, config)):
        tied = place.rule is OUTPUT and config.tie_word_embeddings
        names = family.embedding.hub if tied else place.hub
        whole = [checkpoint[hub] for hub in names]
        group = tensor_group(place.rule)
        want = place.rule.form.numel(parameter.shape, group.size(), sizes(config))
        want += surplus * parameter.shape[1] if isinstance(place.rule.form, Vocabulary) else 0
        shapes = [tuple(tensor.get_shape()) for tensor in whole]
        if sum(torch.Size(shape).numel() for shape in shapes) != want:
            raise ModelError(
                f"{folder}: {', '.join(names)} of shape {shapes} do not fill {name}, {want} numbers in all; is "
                "config.json the one of these weights?"
            )
        parameter.copy_(place.rule.form.cut(whole, parameter.shape, group.rank(), sizes(config)))


def _check_tied(checkpoint: Checkpoint, config: PretrainedConfig) -> None:
    """Raises ModelError where the config ties a head that the folder has apart, as `transformers` would keep it."""
    (head,), (embedding,) = OUTPUT.hub, family_of(config).embedding.hub
    if not config.tie_word_embeddings or head not in checkpoint.files:
        return
    one, two = checkpoint[head][...], checkpoint[embedding][...]
    if one.dtype != two.dtype or not torch.equal(one, two):
        raise ModelError(
            f"{checkpoint.folder} has {head} apart from {embedding}, but config.json ties them; set "
            "tie_word_embeddings to false there, or remove the one that is not meant"
        )


@dataclass(frozen=True, slots=True)
class _Piece:
    stage: int
    chunk: int
    name: str
    shape: torch.Size
    dtype: torch.dtype
    rule: int
    layer: int
    expert: int
    rest: str


class Export:
    """All weights under the hub's names, full, adapters merged, on every rank; what goes where is planned once.

    A collective: every rank builds it, and every rank iterates to the end each time.
    """

    def __init__(
        self, chunks: Sequence[Any], config: PretrainedConfig, *, prefix: str = "", bucket_bytes: int = 1 << 28
    ) -> None:
        """`prefix` is put before all names; `bucket_bytes` is about how much is gathered at a time."""
        self.config, self._prefix = config, prefix
        self.rules = family_of(config).rules
        self._models = [unwrapped(chunk) for chunk in chunks]
        self._parameters: list[dict[str, Tensor]] = []
        self._adapted: list[dict[str, Adapted]] = []
        self._pipeline = parallel_state.get_pipeline_model_parallel_group()
        self._experts = parallel_state.get_expert_model_parallel_group()
        self._buckets = list(self._plan(chunks, bucket_bytes))

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) in the order of the layers; a tensor is valid until the next is taken, copy it to keep it."""
        # Anew each time: what wraps the model may have moved the parameters that hold several experts.
        self._parameters = [dict(unstacked(model.named_parameters())) for model in self._models]
        self._adapted = [dict(adapted(model)) for model in self._models]
        for bucket in self._buckets:
            yield from self._open(bucket)

    def _plan(self, chunks: Sequence[Any], bucket_bytes: int) -> Iterator[list[_Piece]]:
        stage = self._pipeline.rank()
        mine = [
            _Piece(stage, number, name, p.shape, p.dtype, self.rules.index(at.rule), at.layer, at.expert, at.rest)
            for number, chunk in enumerate(chunks)
            for name, p, at in places(chunk, self.config)
            if not (at.rule is OUTPUT and self.config.tie_word_embeddings)
        ]
        everyone: list[Any] = [None] * self._pipeline.size()
        dist.all_gather_object(everyone, mine, group=self._pipeline)
        bucket: list[_Piece] = []
        size = 0
        for piece in sorted((p for pieces in everyone for p in pieces), key=lambda p: (p.chunk, p.stage)):
            nbytes = piece.shape.numel() * piece.dtype.itemsize * self._copies(piece)
            if bucket and (size + nbytes > bucket_bytes or self._kind(piece) != self._kind(bucket[0])):
                yield bucket
                bucket, size = [], 0
            bucket.append(piece)
            size += nbytes
        yield bucket

    def _kind(self, piece: _Piece) -> tuple[int, bool, torch.dtype]:
        return piece.stage, self.rules[piece.rule].of_experts, piece.dtype

    def _copies(self, piece: _Piece) -> int:
        rule = self.rules[piece.rule]
        return int(tensor_group(rule).size() * (self._experts.size() if rule.of_experts else 1))

    @torch.no_grad()
    def _open(self, bucket: list[_Piece]) -> Iterator[tuple[str, Tensor]]:
        parts = self._gather(bucket)
        per_rank = number_of_experts(self.config) // self._experts.size()
        first = 0
        for piece in bucket:
            rule = self.rules[piece.rule]
            run = parts[:, :, first : first + piece.shape.numel()].reshape(*parts.shape[:2], *piece.shape)
            first += piece.shape.numel()
            for rank, shards in enumerate(run):
                expert = piece.expert + (rank - self._experts.rank()) * per_rank
                names = [self._prefix + name for name in Place(rule, piece.layer, expert, piece.rest).hub]
                yield from zip(names, rule.form.join(list(shards), sizes(self.config)), strict=True)

    def _value(self, piece: _Piece) -> Tensor:
        linear = self._adapted[piece.chunk].get(piece.name)
        return self._parameters[piece.chunk][piece.name].detach() if linear is None else linear.merged()

    def _gather(self, bucket: list[_Piece]) -> Tensor:
        """[expert-parallel ranks, tensor-parallel ranks, numbers of the bucket] on every rank."""
        rule, piece = self.rules[bucket[0].rule], bucket[0]
        if piece.stage == self._pipeline.rank():
            flat = torch.cat([self._value(p).flatten() for p in bucket])
        else:
            device = next(iter(self._parameters[0].values())).device
            flat = torch.empty(sum(p.shape.numel() for p in bucket), dtype=piece.dtype, device=device)
        if self._pipeline.size() > 1:
            dist.broadcast(flat, dist.get_global_rank(self._pipeline, piece.stage), group=self._pipeline)
        flat = _gather(flat[None], tensor_group(rule))
        return _gather(flat[None], self._experts) if rule.of_experts else flat[None]


def _gather(tensor: Tensor, group: Any) -> Tensor:
    """[1, …] of each rank → [ranks, …]."""
    if group.size() == 1:
        return tensor
    out = tensor.new_empty(group.size(), *tensor.shape[1:])
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed by torch 2.14
    gather(out, tensor, group=group)
    return out
