"""The tensors of Hugging Face model folders: read by name, written shard by shard."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from relax_gym.errors import ModelError
from relax_gym.models import SPEAKERS, WEIGHTS, WEIGHTS_INDEX, language_prefix
from relax_gym_trainers.tensor_files import write_tensors


class Checkpoint:
    """The tensors of a model folder; only what is sliced of one is read."""

    def __init__(self, folder: Path, prefix: str = "") -> None:
        """Of those whose names begin with `prefix`, under the rest of their names.

        Raises:
            ModelError: the folder has no safetensors, or not all of its files.
        """
        self.folder, self._prefix = folder, prefix
        self._files: dict[str, Any] = {}
        # As `transformers`, which passes over an index that was left beside a whole file.
        if (folder / WEIGHTS_INDEX).is_file() and not (folder / WEIGHTS).is_file():
            files: dict[str, str] = json.loads((folder / WEIGHTS_INDEX).read_text(encoding="utf-8"))["weight_map"]
        else:
            files = dict.fromkeys(self._open(WEIGHTS).keys(), WEIGHTS)
        self.files = {name.removeprefix(prefix): file for name, file in files.items() if name.startswith(prefix)}

    def __getitem__(self, name: str) -> Any:
        """A slice as safetensors gives it, with `get_shape()`."""
        if name not in self.files:
            raise ModelError(f"{self.folder} has no tensor {name!r}; is config.json the one of these weights?")
        return self._open(self.files[name]).get_slice(self._prefix + name)

    def _open(self, file: str) -> Any:
        if file not in self._files:
            if not (self.folder / file).is_file():
                raise ModelError(f"{self.folder} has no {file}; the Megatron learner reads safetensors only")
            self._files[file] = safe_open(self.folder / file, framework="pt")
        return self._files[file]


def write_folder(
    tensors: Iterable[tuple[str, Tensor]],
    source: Path,
    folder: Path | None,
    *,
    whole: Path | None = None,
    shard_bytes: int = 5 * 10**9,
) -> None:
    """Write what a learner trains as a model folder that `transformers` loads.

    Args:
        tensors: Under the names that they have in `source`.
        source: A folder with the model's configs, which are copied.
        folder: None on the ranks that do not write, but must iterate.
        whole: The folder that the model was loaded from, if not `source`. Of a model that also speaks, what else than
            the language model is copied from there as it is, a tensor at a time.
        shard_bytes: A file holds at most this much, or one tensor.
    """
    shards = _Shards(folder, shard_bytes) if folder else None
    prefix, whole = language_prefix(source), whole or source
    for name, tensor in chain(tensors, others(whole, prefix) if shards and prefix else ()):
        if shards:
            shards.add(name, tensor)
    if not shards or not folder:
        return
    shards.finish()
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    for part in (config, config["thinker_config"]) if prefix else (config,):
        for key in {"dtype", "torch_dtype"} & set(part) or {"dtype"}:
            part[key] = str(shards.dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for file in (source / "generation_config.json", whole / SPEAKERS):
        if file.is_file():
            shutil.copyfile(file, folder / file.name)


def others(folder: Path, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors whose names do not begin with `prefix`."""
    checkpoint = Checkpoint(folder)
    for name in checkpoint.files:
        if not name.startswith(prefix):
            yield name, checkpoint[name][...]


class _Shards:
    """Files of tensors; how many there are is known only at the end."""

    def __init__(self, folder: Path, limit: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.limit = folder, limit
        self.dtype: torch.dtype | None = None  # of the first
        self._shard: dict[str, Tensor] = {}
        self._size = self._total = 0
        self._written: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        if self._shard and self._size + tensor.nbytes > self.limit:
            self._flush()
        self.dtype = self.dtype or tensor.dtype
        self._size += tensor.nbytes
        self._shard[name] = tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)

    def finish(self) -> None:
        self._flush()
        count = len(self._written)
        if count == 1:
            self._part(0).rename(self.folder / WEIGHTS)
            return
        weights: dict[str, str] = {}
        for number, names in enumerate(self._written):
            file = f"model-{number + 1:05}-of-{count:05}.safetensors"
            self._part(number).rename(self.folder / file)
            weights |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self._total}, "weight_map": weights}
        (self.folder / WEIGHTS_INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _part(self, number: int) -> Path:
        return self.folder / f"part-{number}.safetensors"

    def _flush(self) -> None:
        write_tensors(self._part(len(self._written)), self._shard, {"format": "pt"})
        self._written.append(list(self._shard))
        self._total += self._size
        self._shard, self._size = {}, 0
