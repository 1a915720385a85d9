"""Tensors cut among ranks, in files: each rank writes its own, in the background; any rank reads any region.

The files are safetensors and the index is JSON, so that nothing in a checkpoint can run code. megatron-core's own files
are pickles, are written by processes forked from one that uses CUDA, and differ between its versions.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from relax_gym.errors import RunFolderError, reason

INDEX = "index.json"

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Region:
    """A box in the whole tensor `key`, which is of `shape`; `offset` and `size` have as many axes."""

    key: str
    shape: Shape
    offset: Shape
    size: Shape

    @property
    def name(self) -> str:
        """What a file calls it."""
        return f"{self.key}@{','.join(map(str, self.offset))}"


class Writing:
    """Writes files, one after the other, in a thread of its own."""

    def __init__(self, writers: Mapping[Path, Callable[[], None]]) -> None:
        """By what they write."""
        self._error: str | None = None
        self._thread = threading.Thread(target=self._write, args=(writers,), name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> str | None:
        """Until all is on the disk. Returns why it is not."""
        self._thread.join()
        return self._error

    def _write(self, writers: Mapping[Path, Callable[[], None]]) -> None:
        for path, write in writers.items():
            try:
                write()
            except Exception as error:
                why = error.strerror if isinstance(error, OSError) and error.strerror else reason(error)
                self._error = f"cannot write {path}: {why}"
                return


def write_index(folder: Path, index: Mapping[str, Any]) -> None:
    """The file that says that all others are there, written after them."""
    with (folder / INDEX).open("w", encoding="utf-8") as file:
        json.dump(index, file)
        file.flush()
        os.fsync(file.fileno())


def table(found: Sequence[tuple[str, Sequence[Region]]]) -> dict[str, Any]:
    """Which file holds what, for the index.

    Raises:
        RunFolderError: the regions do not fill their tensors, or overlap.
    """
    out: dict[str, Any] = {}
    for file, regions in found:
        for region in regions:
            entry = out.setdefault(region.key, {"shape": region.shape, "parts": []})
            entry["parts"].append([region.offset, region.size, file])
    for key, entry in out.items():
        have = sum(_volume(size) for _, size, _ in entry["parts"])
        if have != _volume(entry["shape"]):
            raise RunFolderError(f"{key}: ranks have {have} of {_volume(entry['shape'])} numbers; this is a bug")
    return out


class Stored:
    """The tensors of a checkpoint."""

    def __init__(self, folder: Path) -> None:
        """Raises RunFolderError where the folder is no whole checkpoint of this kind."""
        self.folder = folder
        self._files: dict[str, Any] = {}
        try:
            self.index: dict[str, Any] = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RunFolderError(
                f"{folder} is no checkpoint that a Megatron learner has written to its end: {INDEX}: {reason(error)}"
            ) from error
        for file, size in self.index["files"].items():
            path = folder / file
            have = path.stat().st_size if path.is_file() else "no"
            if have != size:
                raise RunFolderError(
                    f"{path} has {have} bytes, not {size}; take another checkpoint: a run resumes from the one before "
                    "when its newest is deleted"
                )

    def check(self, region: Region, *, padded: bool) -> None:
        """Whether `read` can give it. `padded`: the whole may have been of another size.

        Raises:
            RunFolderError: the checkpoint has no such tensor, or one of another shape.
        """
        if region.key not in self.index["tensors"]:
            raise RunFolderError(f"{self.folder} has no tensor {region.key!r}; it belongs to another model")
        shape = tuple(self.index["tensors"][region.key]["shape"])
        if shape != region.shape and not (padded and len(shape) == len(region.shape)):
            raise RunFolderError(
                f"{self.folder} has {region.key!r} of shape {list(shape)}, but the model loaded has "
                f"{list(region.shape)}; it belongs to another model"
            )

    def read(self, region: Region) -> Tensor:
        """A region on the CPU; zeros where the whole was smaller."""
        out: Tensor | None = None
        for offset, size, file in self.index["tensors"][region.key]["parts"]:
            spans = [_common(*axis) for axis in zip(region.offset, region.size, offset, size, strict=True)]
            if any(stop <= start for start, stop in spans):
                continue
            there = tuple(slice(a - o, b - o) for (a, b), o in zip(spans, offset, strict=True))
            part = self._open(file).get_slice(Region(region.key, (), tuple(offset), ()).name)[there]
            if part.shape == region.size:
                return part  # type: ignore[no-any-return]
            out = part.new_zeros(region.size) if out is None else out
            out[tuple(slice(a - o, b - o) for (a, b), o in zip(spans, region.offset, strict=True))] = part
        return torch.zeros(region.size) if out is None else out

    def rank_file(self, file: str) -> dict[str, Tensor]:
        """What a rank wrote beside its regions, by name."""
        opened = self._open(file)
        return {name: opened.get_tensor(name) for name in opened.keys() if "@" not in name}  # noqa: SIM118

    def _open(self, file: str) -> Any:
        if file not in self._files:
            self._files[file] = safe_open(self.folder / file, framework="pt")
        return self._files[file]


def _common(start: int, size: int, other: int, other_size: int) -> tuple[int, int]:
    return max(start, other), min(start + size, other + other_size)


def _volume(shape: Sequence[int]) -> int:
    out = 1
    for size in shape:
        out *= size
    return out
