"""Weights to servers of this machine, which read them from the learner's memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import torch

from relax_gym.sampler import Weights
from relax_gym_plugins.samplers.sglang.weights.base import Failures, Server, Update, WeightSender
from relax_gym_plugins.samplers.sglang.weights.buckets import BUCKET_BYTES, Bucket, buckets
from relax_gym_plugins.samplers.sglang.weights.parcels import Parcel


class IpcSender(WeightSender):
    """`/update_weights_from_tensor` with flattened buckets, each one copy that all ranks of all servers read.

    Servers must run on this machine and see the learner's GPU, if it has one.
    """

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

    async def open(self, servers: Sequence[Server]) -> Failures:
        """See `WeightSender.open`."""
        return {}

    async def send(self, servers: Sequence[Server], weights: Weights, version: int, *, flush: bool = True) -> Failures:
        """See `WeightSender.send`."""
        update = Update(servers, self._timeout)
        async with update.session():
            pending = buckets(weights, self._dtype, self._bucket_bytes)
            # In threads, as computing weights (of adapters, say) and packing them takes long.
            while update.live and (bucket := await asyncio.to_thread(next, pending, None)):
                extra = (
                    {"flush_cache": flush, "weight_version": str(version)} if bucket.last else {"flush_cache": False}
                )
                await self._send(update, bucket, extra)
        return update.failed

    async def _send(self, update: Update, bucket: Bucket, extra: dict[str, Any]) -> None:
        parcel = await asyncio.to_thread(Parcel, bucket)
        before, answered = len(update.live), False
        try:
            await update.post(
                "/update_weights_from_tensor",
                lambda server: {
                    "serialized_named_tensors": [parcel.label() for _ in range(server.tp_size)],
                    "load_format": "flattened_bucket",
                    **extra,
                },
            )
            answered = len(update.live) == before
        finally:
            parcel.free(unread=not answered)

    async def close(self) -> None:
        """See `WeightSender.close`."""
