"""The state of all ranks on the disk: written in the background, read back into any layout.

What of a tensor a rank has is said by megatron-core (`sharded_state_dict`), the same in each of its versions. Weights
are kept once, in the optimizer's float32. Each tensor is written by one of the ranks that have it, as evenly as can be;
what data-parallel ranks share of the optimizer's state is put together by the writer of that parameter only.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from relax_gym.errors import RelaxGymError, RunFolderError, TrainingError, reason
from relax_gym_trainers.megatron_learner import compat, lora  # noqa: F401  (compat before megatron)
from relax_gym_trainers.megatron_learner.checkpoint_files import Region, Stored, Writing, table, write_index
from relax_gym_trainers.megatron_learner.checkpoint_slots import (
    MOMENTS,
    REFERENCE,
    WEIGHT,
    Slot,
    fill,
    may_be_padded,
    read,
    regions,
    set_moments,
    slots,
)
from relax_gym_trainers.megatron_learner.families.base import expert_size, number_of_experts
from relax_gym_trainers.tensor_files import write_tensors

from megatron.core.tensor_parallel import get_cuda_rng_tracker  # isort: skip

FOLDER = "megatron_state"
FORMAT = 2
CONFIGS = ("config.json", "generation_config.json")
"""What an export needs beside the weights."""


class Checkpointer:
    """Saves and loads what one rank of many has; every rank calls every method at the same time."""

    def __init__(
        self,
        chunks: Sequence[Any],
        optimizer: Any,
        config: PretrainedConfig,
        reference: Any,
        control: Any,
        layout: str,
        adapters: dict[str, Any] | None = None,
    ) -> None:
        """`control` is a group of all ranks on the CPU; `layout` names how they are laid out. Of a model with
        `adapters`, described by `lora.facts`, there is nothing else to keep."""
        self._slots = slots(chunks, optimizer)
        self._optimizer, self._config, self._reference = optimizer, config, reference
        self._control, self._layout, self._adapters = control, layout, adapters
        self._rank, self._world = dist.get_rank(control), dist.get_world_size(control)
        self._pending: tuple[Path, Writing, list[Region], dict[str, Any]] | None = None

    @torch.no_grad()
    def save(
        self,
        folder: Path,
        source: Path | None,
        *,
        reference: bool,
        model: Callable[[], None] | None = None,
        **facts: Any,
    ) -> None:
        """Copy everything to host memory and begin to write it into the folder, which is whole after `finish`.

        Args:
            source: The folder that the model came from, on the rank that is to keep its configs, else None.
            reference: Whether the frozen weights belong to the state.
            model: Writes a model folder beside it.
            facts: What else `load` is to return.

        Raises:
            TrainingError: a rank cannot begin; all ranks raise it.
        """
        self.finish()
        place = folder / FOLDER
        self._together(lambda: _begin(place, source) if source is not None else None)
        offers = self._gather([(slot.identity, slot.parameter.numel()) for slot in self._slots])
        step = max((step for step in self._gather(self._step()) if step is not None), default=None)
        tensors = {f"rng.{name}": state for name, state in random_states().items()}
        mine: list[Region] = []
        for number, (slot, writer) in enumerate(zip(self._slots, self._writers(offers), strict=True)):
            values = self._assembled(slot, writer, moments=step is not None)
            if writer == self._rank and reference:
                values[REFERENCE] = self._reference.values[number]
            for kind, value in values.items():
                for region, part in regions(slot.shards, value, kind):
                    mine.append(region)
                    tensors[region.name] = part.to("cpu", copy=True, memory_format=torch.contiguous_format)
        index = {
            "format": FORMAT,
            "layout": self._layout,
            "model": description(self._config),
            "step": step,
            "reference": reference,
            "lora": self._adapters,
            **facts,
        }
        path = place / self._file(self._rank)
        writers: dict[Path, Callable[[], None]] = {path: partial(write_tensors, path, tensors)}
        if model is not None:
            writers[folder] = model
        self._pending = place, Writing(writers), mine, index

    def finish(self) -> None:
        """Wait until all ranks have written what `save` began. Idempotent.

        Raises:
            TrainingError: a rank could not write; all ranks raise it, and it names those that could not.
        """
        if self._pending is None:
            return
        (place, writing, regions, index), self._pending = self._pending, None
        errors = self._gather(writing.wait())
        if any(errors):
            raise TrainingError(
                "the checkpoint was not written: "
                + "; ".join(f"rank {rank} {error}" for rank, error in enumerate(errors) if error)
            )
        files = [self._file(rank) for rank in range(self._world)]
        written = self._gather((place / self._file(self._rank)).stat().st_size)
        found = self._gather(regions)

        def end() -> None:
            if self._rank == 0:  # which hears of what is wrong before it says that the checkpoint is whole
                held = table(list(zip(files, found, strict=True)))
                write_index(place, {**index, "files": dict(zip(files, written, strict=True)), "tensors": held})

        self._together(end)

    @torch.no_grad()
    def load(self, folder: Path) -> dict[str, Any]:
        """Take the state that any layout has saved in the folder; returns the facts saved with it. Random streams go on
        where they were if the layout is the same one.

        Raises:
            RunFolderError: the folder has no state of a Megatron learner, or that of another model.
        """
        if not (folder / FOLDER).is_dir():
            raise RunFolderError(f"{folder} has no {FOLDER}/; give a checkpoint that a Megatron learner has written")
        stored: Stored = self._together(lambda: self._checked(Stored(folder / FOLDER)))
        self._together(lambda: self._fill(stored))
        return stored.index

    def _checked(self, stored: Stored) -> Stored:
        check(stored, self._config)
        lora.check(stored.index.get("lora"), self._adapters, stored.folder)
        moments = MOMENTS if stored.index["step"] is not None else ()
        for slot in self._slots:
            for kind in (WEIGHT, *(moments if slot.optimizer is not None else ())):
                for region, _ in regions(slot.shards, torch.empty_like(slot.parameter, device="meta"), kind):
                    stored.check(region, padded=may_be_padded(slot.shards))
        return stored

    def _fill(self, stored: Stored) -> None:
        step = stored.index["step"]
        for number, slot in enumerate(self._slots):
            fill(slot, stored)
            if stored.index["reference"] and self._reference.values:
                self._reference.values[number].copy_(read(slot, stored, REFERENCE))
            if slot.main is None or slot.optimizer is None:
                continue
            slot.optimizer.state.pop(slot.main, None)
            if step is not None:
                moments = {name: read(slot, stored, name).flatten()[slot.span] for name in MOMENTS}
                set_moments(slot, moments, step)
        if stored.index["layout"] == self._layout:
            rank_file = stored.rank_file(self._file(self._rank))
            restore_random_states({name.removeprefix("rng."): state for name, state in rank_file.items()})

    def _assembled(self, slot: Slot, writer: int | None, *, moments: bool) -> dict[str, Tensor]:
        """On the writer, the whole of the parameter and its moments; those that share it with the writer help."""
        pieces, kinds = slot.pieces(), (WEIGHT, *(MOMENTS if moments and slot.optimizer is not None else ()))
        shape, shared = slot.parameter.shape, slot.group is not None and slot.group.size() > 1
        if writer is None or not (shared or writer == self._rank):
            return {}
        if not shared:  # what has no moments was never stepped
            return {kind: pieces[kind].reshape(shape) if kind in pieces else torch.zeros(shape) for kind in kinds}
        out = {}
        for kind in kinds:
            flat = torch.zeros(slot.parameter.numel(), dtype=torch.float32, device=slot.parameter.device)
            if kind in pieces:
                flat[slot.span] = pieces[kind]
            dist.reduce(flat.view(torch.int32), writer, group=slot.group)  # of bits: -0 and NaN stay what they are
            out[kind] = flat.view(shape)
        return out if writer == self._rank else {}

    def _writers(self, offers: Sequence[Sequence[tuple[tuple[str, ...], int]]]) -> list[int | None]:
        """Who writes each slot: the rank with the least to write of those that have it, largest first. None where
        nobody who shares this rank's part of the optimizer's state does."""
        having, numels = defaultdict[tuple[str, ...], list[int]](list), {}
        for rank, offered in enumerate(offers):
            for identity, numel in offered:
                having[identity].append(rank)
                numels[identity] = numel
        loads, chosen = [0] * self._world, {}
        for identity in sorted(having, key=lambda one: (-numels[one], one)):
            chosen[identity] = min(having[identity], key=lambda rank: (loads[rank], rank))
            loads[chosen[identity]] += numels[identity]
        out: list[int | None] = []
        for slot in self._slots:
            writer, group = chosen[slot.identity], slot.group
            near = [self._rank] if group is None else dist.get_process_group_ranks(group)
            out.append(writer if writer in near else None)
        return out

    def _step(self) -> int | None:
        for slot in self._slots:
            state = slot.optimizer.state.get(slot.main) if slot.main is not None and slot.optimizer else None
            if state:
                return int(state["step"]) if "step" in state else int(slot.optimizer.param_groups[0]["step"])
        return None

    def _file(self, rank: int) -> str:
        return f"rank-{rank:05d}.safetensors"

    def _gather(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self._world
        dist.all_gather_object(found, value, group=self._control)
        return found

    def _together(self, act: Callable[[], Any]) -> Any:
        """What `act` returns on this rank; when it fails on any, all ranks raise."""
        mine: Exception | None = None
        value = None
        try:
            value = act()
        except Exception as error:
            mine = error
        errors = self._gather(None if mine is None else reason(mine))
        if isinstance(mine, RelaxGymError):
            raise mine
        if any(errors):
            rank, text = next((rank, error) for rank, error in enumerate(errors) if error)
            raise TrainingError(f"rank {rank} of {self._world} failed: {text}") from mine
        return value


def _begin(place: Path, source: Path) -> None:
    place.mkdir(parents=True, exist_ok=True)
    for name in CONFIGS:
        if (source / name).is_file():
            shutil.copyfile(source / name, place / name)


def check(stored: Stored, config: PretrainedConfig) -> None:
    """Raises RunFolderError where the state is of another format or model."""
    index = stored.index
    if index.get("format") != FORMAT:
        raise RunFolderError(f"{stored.folder} has format {index.get('format')}; this version reads {FORMAT}")
    mine = description(config)
    other = [f"{key} {value} there, {mine[key]} here" for key, value in index["model"].items() if mine[key] != value]
    if other:
        raise RunFolderError(
            f"{stored.folder} belongs to another model ({'; '.join(other)}); set model.name to the model that the run "
            "began with"
        )


def description(config: PretrainedConfig) -> dict[str, Any]:
    """What tells models apart whose weights are not interchangeable."""
    names = (
        *("model_type", "vocab_size", "hidden_size", "num_hidden_layers"),
        *("num_attention_heads", "num_key_value_heads", "intermediate_size", "tie_word_embeddings"),
    )
    experts = number_of_experts(config)
    return {
        **{name: getattr(config, name) for name in names},
        "experts": experts,
        "expert_size": expert_size(config) if experts else 0,
    }


def random_states() -> dict[str, Tensor]:
    """Of every generator that the rank uses."""
    states = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    tracked = get_cuda_rng_tracker().get_states()
    return states | {f"tracker.{name}": state for name, state in tracked.items() if isinstance(state, Tensor)}


def restore_random_states(states: dict[str, Tensor]) -> None:
    """What `random_states` gave."""
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    tracked = {name.removeprefix("tracker."): state for name, state in states.items() if name.startswith("tracker.")}
    if tracked:
        get_cuda_rng_tracker().set_states(tracked)
