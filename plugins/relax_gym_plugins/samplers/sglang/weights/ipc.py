"""Weights to servers of this machine, which read them from the learner's memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import torch

from relax_gym_plugins.samplers.sglang.weights.base import Failures, Server, Update
from relax_gym_plugins.samplers.sglang.weights.buckets import Bucket, BucketSender
from relax_gym_plugins.samplers.sglang.weights.gpus import ordinal
from relax_gym_plugins.samplers.sglang.weights.parcels import Parcel


class IpcSender(BucketSender):
    """`/update_weights_from_tensor` with flattened buckets, one copy on each GPU, which all ranks there read.

    Servers must run on this machine. A rank reads from its own GPU where this process sees that, as memory that a
    server can free cannot be written to from another GPU; otherwise it must see the learner's.
    """

    async def open(self, servers: Sequence[Server]) -> Failures:
        """See `WeightSender.open`."""
        return {}

    async def _send(self, update: Update, bucket: Bucket, extra: dict[str, Any]) -> None:
        places = {server: _places(server, bucket.device) for server in update.live}
        parcels: dict[torch.device, Parcel] = {}
        lost = set(update.live)
        try:
            for place in {place for found in places.values() for place in found}:
                parcels[place] = await asyncio.to_thread(Parcel, bucket, place)
            await update.post(
                "/update_weights_from_tensor",
                lambda server: {
                    "serialized_named_tensors": [parcels[place].label(server) for place in places[server]],
                    "load_format": "flattened_bucket",
                    **extra,
                },
            )
            lost -= set(update.live)
        finally:
            for parcel in parcels.values():
                parcel.free(lost)

    async def close(self) -> None:
        """See `WeightSender.close`."""


def _places(server: Server, weights: torch.device) -> list[torch.device]:
    """Where each rank of a server reads weights that are on a device."""
    if weights.type != "cuda":
        return [weights] * server.tp_size
    own = [ordinal(name) for name in [*server.devices, *[""] * server.tp_size][: server.tp_size]]
    return [weights if number is None else torch.device("cuda", number) for number in own]
