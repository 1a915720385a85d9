"""Weights to servers of this machine, which read them from the learner's memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from relax_gym_plugins.samplers.sglang.weights.base import Failures, Server, Update
from relax_gym_plugins.samplers.sglang.weights.buckets import Bucket, BucketSender
from relax_gym_plugins.samplers.sglang.weights.parcels import Parcel


class IpcSender(BucketSender):
    """`/update_weights_from_tensor` with flattened buckets, each one copy that all ranks of all servers read.

    Servers must run on this machine and see the learner's GPU, if it has one.
    """

    async def open(self, servers: Sequence[Server]) -> Failures:
        """See `WeightSender.open`."""
        return {}

    async def _send(self, update: Update, bucket: Bucket, extra: dict[str, Any]) -> None:
        parcel = await asyncio.to_thread(Parcel, bucket)
        lost = set(update.live)
        try:
            await update.post(
                "/update_weights_from_tensor",
                lambda server: {
                    "serialized_named_tensors": [parcel.label(server) for _ in range(server.tp_size)],
                    "load_format": "flattened_bucket",
                    **extra,
                },
            )
            lost -= set(update.live)
        finally:
            parcel.free(lost)

    async def close(self) -> None:
        """See `WeightSender.close`."""
