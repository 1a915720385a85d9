"""Weights in buckets: at most so many bytes at a time, cast, laid out one after the other; and sending these."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from relax_gym.sampler import Weights
from relax_gym_plugins.samplers.sglang.weights.base import Failures, Server, Update, WeightSender

BUCKET_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a tensor lies in a bucket: bytes `start` to `end`."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start: int
    end: int


class Bucket:
    """Some weights, not copied yet. They lie by falling width of their elements, so that each is aligned without gaps:
    a server that is told only names, shapes and dtypes finds the same places."""

    def __init__(self, weights: list[tuple[str, Tensor]], dtype: torch.dtype | None, *, last: bool) -> None:
        self.last = last
        self.weights = sorted(weights, key=lambda named: -cast(named[1], dtype).itemsize)
        self.slots: list[Slot] = []
        end = 0
        for name, tensor in self.weights:
            start, end = end, end + size(tensor, dtype)
            self.slots.append(Slot(name, tensor.shape, cast(tensor, dtype), start, end))
        self.nbytes = end
        self.device = self.weights[0][1].device

    def pack(self, flat: Tensor) -> Tensor:
        """Copy the weights into `flat` (uint8, `nbytes` long, on any device) and return it, complete on its device."""
        with torch.no_grad():
            for slot, (_, tensor) in zip(self.slots, self.weights, strict=True):
                # One copy casts, gathers what is not contiguous and crosses devices.
                flat[slot.start : slot.end].view(slot.dtype).view(slot.shape).copy_(tensor)
        if flat.is_cuda:
            torch.cuda.synchronize(flat.device)
        return flat


def buckets(weights: Weights, dtype: torch.dtype | None = None, bucket_bytes: int = BUCKET_BYTES) -> Iterator[Bucket]:
    """Cut weights into buckets in order; a tensor larger than a bucket gets one of its own.

    Only references are held, so that the next tensor can be looked at to know which bucket is the last.

    Args:
        dtype: what floating-point tensors become; None leaves them.

    Raises:
        ValueError: there are no weights.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes is {bucket_bytes}; it must be at least 1")
    held: list[tuple[str, Tensor]] = []
    filled = 0
    for name, tensor in weights:
        more = size(tensor, dtype)
        if more and filled and filled + more > bucket_bytes:
            yield Bucket(held, dtype, last=False)
            held, filled = [], 0
        held.append((name, tensor.detach()))
        filled += more
    if not filled:
        raise ValueError("there are no weights to send: every tensor given is empty, or none was given")
    yield Bucket(held, dtype, last=True)


def last_words(bucket: Bucket, version: int, flush: bool) -> dict[str, Any]:
    """What goes with a bucket: only with the last are caches flushed, and is the version said."""
    return {"flush_cache": flush, "weight_version": str(version)} if bucket.last else {"flush_cache": False}


def cast(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype that a tensor is sent in."""
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def size(tensor: Tensor, dtype: torch.dtype | None) -> int:
    """The bytes of a tensor as it is sent."""
    return tensor.numel() * cast(tensor, dtype).itemsize


class BucketSender(WeightSender):
    """Sends one bucket after the other to all servers at once."""

    def __init__(
        self, *, dtype: torch.dtype | None = None, bucket_bytes: int = BUCKET_BYTES, timeout: float = 120.0
    ) -> None:
        """
        Args:
            dtype: the servers'; None sends tensors as they are.
            bucket_bytes: memory that an update may take on top; one tensor that is larger takes its size.
            timeout: seconds that a server may take for one bucket.
        """
        self._dtype, self._bucket_bytes, self._timeout = dtype, bucket_bytes, timeout

    async def send(self, servers: Sequence[Server], weights: Weights, version: int, *, flush: bool = True) -> Failures:
        """See `WeightSender.send`."""
        update = Update(servers, self._timeout)
        async with update.session():
            pending = buckets(weights, self._dtype, self._bucket_bytes)
            # In threads, as computing weights (of adapters, say) and packing them takes long.
            while update.live and (bucket := await asyncio.to_thread(next, pending, None)):
                last = {"flush_cache": flush, "weight_version": str(version)}
                await self._send(update, bucket, last if bucket.last else {"flush_cache": False})
        return update.failed

    @abstractmethod
    async def _send(self, update: Update, bucket: Bucket, extra: dict[str, Any]) -> None:
        """Bring one bucket to the live servers, with `extra` in the request; drop those that fail."""
