"""Weights to servers on other GPUs or machines, by collective broadcast."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from relax_gym.errors import SamplerError, reason
from relax_gym_plugins.samplers.sglang.weights.base import FAREWELL, Failures, Server, Update
from relax_gym_plugins.samplers.sglang.weights.buckets import BUCKET_BYTES, Bucket, BucketSender
from relax_gym_plugins.samplers.sglang.weights.group import Backend, Group, check_nccl, in_thread, own_address

LINGER = 2.0
"""Seconds to leave the store open after a failure to join: whoever has not reached it yet would try for very long."""


class BroadcastSender(BucketSender):
    """`/update_weights_from_distributed` with flattened buckets, over one group of the learner and all ranks.

    When a server fails, the group is left and another one made without it, and the bucket is sent again. Servers that
    were caught in the broadcast take part again if they answer; with NCCL they may hang with it and fail too. Servers
    that are new or gone since the last update make it a new group.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        dtype: torch.dtype | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        timeout: float = 120.0,
        address: str | None = None,
    ) -> None:
        """
        Args:
            backend: "nccl" between GPUs, "gloo" between CPUs.
            dtype: the servers'; None sends tensors as they are.
            bucket_bytes: memory that an update may take on top, here and there.
            timeout: seconds that joining the group and each bucket may take.
            address: of this machine, as servers reach it; default: of the interface that leads to them.

        Raises:
            SamplerError: see `check_nccl`.
        """
        if backend == "nccl":
            check_nccl()
        super().__init__(dtype=dtype, bucket_bytes=bucket_bytes, timeout=timeout)
        self._backend, self._address = backend, address
        self._farewell = min(FAREWELL, timeout)
        self._group: Group | None = None
        self._members: tuple[Server, ...] = ()
        self._trouble = "the servers' logs may say why"

    async def open(self, servers: Sequence[Server]) -> Failures:
        """See `WeightSender.open`."""
        if not set(self._members).isdisjoint(servers):
            await self._leave()  # whoever asks to be let in has forgotten the group, as a server that was restarted
        update = Update(servers, self._timeout)
        await self._gather(update)
        return update.failed

    async def _send(self, update: Update, bucket: Bucket, extra: dict[str, Any]) -> None:
        device = f"cuda:{torch.cuda.current_device()}" if self._backend == "nccl" else "cpu"
        device = str(bucket.device) if self._backend == "nccl" and bucket.device.type == "cuda" else device
        flat = torch.empty(bucket.nbytes, dtype=torch.uint8, device=device)
        await asyncio.to_thread(bucket.pack, flat)
        for _ in range(len(update.live) + 1):
            await self._gather(update)
            if not update.live or await self._broadcast(update, bucket, flat, extra):
                return
        for server in tuple(update.live):
            update.drop(server, SamplerError(f"{server.url}: no broadcast of weights succeeded: {self._trouble}"))

    async def _broadcast(self, update: Update, bucket: Bucket, flat: Tensor, extra: dict[str, Any]) -> bool:
        group = self._group
        assert group is not None
        body = {
            "names": [slot.name for slot in bucket.slots],
            "dtypes": [str(slot.dtype).removeprefix("torch.") for slot in bucket.slots],
            "shapes": [list(slot.shape) for slot in bucket.slots],
            "group_name": group.name,
            "load_format": "flattened_bucket",
            **extra,
        }
        return await self._together(
            update, lambda: group.broadcast(flat), lambda server: ("/update_weights_from_distributed", body)
        )

    async def _gather(self, update: Update) -> None:
        """Have a group of exactly the live servers, dropping those that do not join."""
        for _ in range(len(update.live) + 1):
            if not update.live or (self._group is not None and self._members == tuple(update.live)):
                return
            await self._leave()
            await self._join(update)
        for server in tuple(update.live):
            update.drop(server, SamplerError(f"{server.url} did not join the group for weights: {self._trouble}"))

    async def _join(self, update: Update) -> None:
        self._members = members = tuple(update.live)
        address = self._address
        if address is None:
            address = await asyncio.to_thread(own_address, [server.url for server in members])
        world = 1 + sum(server.tp_size for server in members)
        self._group = group = Group(self._backend, world, address, self._timeout)
        offsets, rank = {}, 1
        for server in members:
            offsets[server], rank = rank, rank + server.tp_size

        def body(server: Server) -> tuple[str, dict[str, Any]]:
            return "/init_weights_update_group", {
                "master_address": group.address,
                "master_port": group.port,
                "rank_offset": offsets[server],
                "world_size": world,
                "group_name": group.name,
                "backend": self._backend,
            }

        await self._together(update, group.join, body, linger=min(LINGER, self._timeout))

    async def _together(
        self,
        update: Update,
        act: Callable[[], None],
        call: Callable[[Server], tuple[str, dict[str, Any]]],
        *,
        linger: float = 0.0,
    ) -> bool:
        """Act while all live servers do their part; whether all did.

        If not, the group is gone. Servers that failed before it was are dropped, and those that do not answer even
        then; others failed because of it and stay.
        """
        ours = asyncio.ensure_future(in_thread(act))
        limit = self._timeout + 2 * self._farewell + LINGER  # longer than we wait below
        posts = {}
        for server in update.live:
            path, body = call(server)
            posts[asyncio.ensure_future(server.post(path, body, timeout=limit))] = server
        try:
            pending = await _until_trouble([ours, *posts], self._timeout)
            for post in [post for post in posts if post.done()]:
                self._judge(update, posts[post], post)
            if not pending and ours.exception() is None and len(update.live) == len(posts):
                return True
            await asyncio.wait([ours, *posts], timeout=linger)
            await self._leave()
            if waiting := [post for post in posts if not post.done()]:
                await asyncio.wait(waiting, timeout=self._farewell)
            if ours.done() and (error := ours.exception()):
                self._trouble = reason(error)
            for post in waiting:
                if not post.done():
                    late = f"{posts[post].url} did not take its part within {self._timeout:g} s: {self._trouble}"
                    update.drop(posts[post], SamplerError(late))
            return False
        except BaseException:
            await self._leave()  # in the middle of something
            raise
        finally:
            await _cancel([ours, *posts])

    def _judge(self, update: Update, server: Server, post: asyncio.Future[Any]) -> None:
        error = post.exception()
        if isinstance(error, SamplerError):
            update.drop(server, error)
        elif error is not None:
            raise error

    async def _leave(self) -> None:
        """Leave the group, and tell its members to, as well as they can."""
        group, self._group = self._group, None
        if group is None:
            return
        await self._quietly(in_thread(group.abort))
        body = {"group_name": group.name}
        farewells = [server.post("/destroy_weights_update_group", body, timeout=FAREWELL) for server in self._members]
        self._members = ()
        await asyncio.gather(*(self._quietly(farewell) for farewell in farewells))

    async def _quietly(self, call: Coroutine[Any, Any, Any]) -> None:
        """Await something whose failure changes nothing."""
        try:
            await asyncio.wait_for(call, self._farewell)
        except (SamplerError, TimeoutError, RuntimeError):
            return

    async def close(self) -> None:
        """See `WeightSender.close`."""
        await self._leave()


async def _until_trouble(futures: Iterable[asyncio.Future[Any]], timeout: float) -> set[asyncio.Future[Any]]:
    """Wait for all, for the first to fail, or for `timeout` seconds; those that are not done."""
    _, pending = await asyncio.wait(set(futures), timeout=timeout, return_when=asyncio.FIRST_EXCEPTION)
    return pending


async def _cancel(futures: Iterable[asyncio.Future[Any]]) -> None:
    futures = list(futures)
    for future in futures:
        future.cancel()
    await asyncio.gather(*futures, return_exceptions=True)
