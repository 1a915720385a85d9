"""Weights to servers that see the run folder."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from relax_gym.sampler import Weights
from relax_gym_plugins.samplers.sglang.weights.base import Failures, Server, Update, WeightSender
from relax_gym_plugins.samplers.sglang.weights.buckets import buckets, cast

SHARD_BYTES = 2_000_000_000
INDEX = "model.safetensors.index.json"


class DiskSender(WeightSender):
    """`/update_weights_from_disk` from `folder/<version>`, of which only the newest is kept.

    Servers must see `folder` under the same path. Needs as much disk as the weights are large, twice while writing.
    """

    def __init__(
        self,
        folder: Path,
        model: Path,
        *,
        dtype: torch.dtype | None = None,
        shard_bytes: int = SHARD_BYTES,
        timeout: float = 600.0,
    ) -> None:
        """
        Args:
            folder: where the versions go.
            model: whose config and tokenizer are linked to.
            dtype: the servers'; None writes tensors as they are.
            shard_bytes: most bytes of one file, and of memory that writing takes on top; a larger tensor gets a file.
            timeout: seconds that a server may take to load all.
        """
        self._folder, self._model = folder.absolute(), model.absolute()
        self._dtype, self._shard_bytes, self._timeout = dtype, shard_bytes, timeout

    async def open(self, servers: Sequence[Server]) -> Failures:
        """See `WeightSender.open`."""
        return {}

    async def send(self, servers: Sequence[Server], weights: Weights, version: int, *, flush: bool = True) -> Failures:
        """See `WeightSender.send`."""
        path = await asyncio.to_thread(self._write, weights, version)
        update = Update(servers, self._timeout)
        body = {"model_path": str(path), "weight_version": str(version), "flush_cache": flush}
        await update.post("/update_weights_from_disk", lambda server: body)
        await asyncio.to_thread(self._forget, path)
        return update.failed

    def _write(self, weights: Weights, version: int) -> Path:
        """Complete, or not there at all: a server never reads half a folder."""
        partial = self._folder / f".{version}-{uuid.uuid4().hex}"
        partial.mkdir(parents=True)
        try:
            self._link(partial)
            self._shards(partial, weights)
            final = self._folder / str(version)
            if final.exists():  # an earlier run's, or sent again
                final.rename(self._folder / f".{version}-{uuid.uuid4().hex}")
            return partial.rename(final)
        except BaseException:
            shutil.rmtree(partial)
            raise

    def _link(self, folder: Path) -> None:
        for file in self._model.iterdir():
            if file.is_file() and file.suffix not in (".safetensors", ".bin", ".pt", ".gguf") and file.name != INDEX:
                os.symlink(file.resolve(), folder / file.name)

    def _shards(self, folder: Path, weights: Weights) -> None:
        places: dict[str, str] = {}
        total = 0
        for number, bucket in enumerate(buckets(weights, self._dtype, self._shard_bytes)):
            shard = f"model-{number:05d}.safetensors"
            tensors = dict(self._plain(bucket.weights))
            save_file(tensors, folder / shard, metadata={"format": "pt"})
            places |= dict.fromkeys(tensors, shard)
            total += bucket.nbytes
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")

    def _plain(self, weights: Sequence[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Safetensors takes no tensors that share memory or have gaps."""
        for name, tensor in weights:
            # A copy even where nothing changes.
            yield name, torch.empty(tensor.shape, dtype=cast(tensor, self._dtype)).copy_(tensor)

    def _forget(self, newest: Path) -> None:
        for old in self._folder.iterdir():
            if old != newest:
                shutil.rmtree(old)

    async def close(self) -> None:
        """Remove what was written. See `WeightSender.close`."""
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
