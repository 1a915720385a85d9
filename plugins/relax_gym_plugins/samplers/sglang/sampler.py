"""The SGLang sampler: servers, their weights, and what the sessions share."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig

from relax_gym.context import RunContext
from relax_gym.errors import ConfigError, SamplerError
from relax_gym.sampler import Sampler, SamplingParams, Session, Weights
from relax_gym.types import FinishReason
from relax_gym_plugins.samplers.sglang.engine import Engine, EngineError
from relax_gym_plugins.samplers.sglang.fleet import Fleet, Member, State
from relax_gym_plugins.samplers.sglang.options import SGLangSamplerOptions
from relax_gym_plugins.samplers.sglang.protocol import BadReply, Piece
from relax_gym_plugins.samplers.sglang.senders import build_sender, servers_dtype
from relax_gym_plugins.samplers.sglang.servers import attach, launch
from relax_gym_plugins.samplers.sglang.session import SGLangSession
from relax_gym_plugins.samplers.sglang.weights.base import Failures, Server
from relax_gym_plugins.samplers.sglang.weights.checksums import Checked
from relax_gym_plugins.samplers.sglang.weights.names import checkpoint_names
from relax_gym_plugins.samplers.sglang.wire_media import WireMedia

log = logging.getLogger("relax_gym")

STRIKES = 3
"""Failures in a row that take a server out."""
PAUSE_TRIES, PAUSE_SECONDS = 10, 0.1
"""How often requests are told to end before a server is left to see to it, and for how long each time."""


class SGLangSampler(Sampler):
    """Samples from SGLang servers. See `SGLangSamplerOptions` for what can be chosen."""

    def __init__(self, context: RunContext, options: SGLangSamplerOptions) -> None:
        self.options = options
        self.fleet = Fleet(self._revive)
        self.open = asyncio.Event()  # cleared while weights are replaced
        self._context = context
        self._version = -1
        settings = AutoConfig.from_pretrained(
            context.model_path, trust_remote_code=context.config.model.trust_remote_code
        )
        self._settings = settings.get_text_config()
        if options.routed_experts and not getattr(self._settings, "num_experts_per_tok", None):
            raise ConfigError(f"sampler.routed_experts: {settings.model_type} has no experts to record; leave it out")
        self.media = WireMedia(
            settings.model_type,
            context.tokenizer,
            context.processor,
            lambda: [member.engine for member in self.fleet.present if member.engine.info],
        )
        self._kept: dict[str, torch.Tensor] = {}
        self._whole = True  # what is kept is of one version
        self._dtype = servers_dtype(options, settings)
        self._sender = build_sender(options, context, self._dtype)
        self._updating = asyncio.Lock()
        self._resting = False
        self._woken = asyncio.Condition(self._updating)
        self._counts: dict[str, float] = defaultdict(float)
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def version(self) -> int:
        """See `Sampler.version`."""
        return self._version

    @property
    def max_context(self) -> int:
        """See `Sampler.max_context`."""
        limits = [
            member.engine.max_context for member in self.fleet.present or self.fleet.members if member.engine.info
        ]
        if not limits:
            raise SamplerError("the sglang sampler is not started; await start() first")
        return min([*limits, *([self.options.max_context] if self.options.max_context else [])])

    @property
    def capacity(self) -> int | None:
        """See `Sampler.capacity`: that of the servers that serve, None while one of them does not say."""
        sizes = [member.engine.capacity for member in self.fleet.serving]
        known = [size for size in sizes if size is not None]
        return sum(known) if known and len(known) == len(sizes) else None

    async def start(self) -> None:
        """Launch or attach to all servers."""
        for url in self.options.urls or [None] * self.options.engines:
            self.fleet.members.append(self._member(url))
        members = list(self.fleet.members)
        await _together(member.connect() for member in members)
        _raise_first(await self._sender.open([member.engine for member in members]))
        for member in members:
            await self.fleet.serve(member)
        await self.rest()
        self.open.set()

    def open_session(self) -> Session:
        """See `Sampler.open_session`."""
        return SGLangSession(self)

    async def aclose(self) -> None:
        """Close connections and end the servers that were launched."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            await self._sender.close()  # tells servers, which must be there for it
        finally:
            await self.fleet.aclose()

    # Servers that come and go -----------------------------------------------------------------------------------------

    async def add_engine(self, url: str | None = None) -> Member:
        """One more server, attached to by URL or launched. It serves once it has the current weights. While servers
        `rest`, this waits with a launch until the next update.

        Raises:
            SamplerError: it cannot be reached or launched, or does not take the weights, or no devices are free.
        """
        member = self._member(url)
        self.fleet.members.append(member)
        try:
            await self._revive(member)
        except BaseException:
            await self.fleet.drop(member)
            raise
        return member

    def _member(self, url: str | None) -> Member:
        if url:
            if self._context.processor is not None:
                log.warning("%s must run with SGLANG_VLM_CACHE_SIZE_MB=0, or it keeps what older weights saw", url)
            return attach(url, self.options)
        given, taken = self.options.devices, {member.devices for member in self.fleet.present}
        free = [devices for devices in given if devices not in taken]
        if given and not free:
            raise SamplerError(f"all of sampler.devices {list(given)} have a server; list those that may join as well")
        number = len(self.fleet.members)
        return launch(number, self.options, self._context, devices=free[0] if free else None)

    async def remove_engine(self, member: Member) -> None:
        """Send a server nothing more, wait for what it still has, then close it."""
        await self.fleet.remove(member)

    async def _revive(self, member: Member) -> None:
        """Connect a server, get it ready and let it serve."""
        if not self.options.colocate:
            await member.connect()
            async with self._updating:
                await self._ready(member)
            return
        async with self._updating:  # so that `rest` waits for a launch, which takes memory
            await self._woken.wait_for(lambda: not (member.launched and self._resting))
            await member.connect()
            await self._ready(member)

    async def _ready(self, member: Member) -> None:
        """Give a server the current weights, or have it rest as others do until the next, and let it serve. It has no
        requests from before by then: what they sample while weights change would be of no version."""
        engine = member.engine
        await engine.empty()
        _raise_first(await self._sender.open([engine]))
        if self._resting:
            await engine.resume()  # in which state `rest` finds the others
            await engine.release()
        elif self._version >= 0:
            if not self._whole:
                raise SamplerError("the last update of weights broke off; a server joins after the next")
            await engine.restore("weights")
            _raise_first(await self._bring([engine], self._kept.items(), self._version, flush=not engine.released))
            await engine.restore("kv_cache")
        await engine.resume()
        await self.fleet.serve(member)  # before an update can begin without it

    # Weights ----------------------------------------------------------------------------------------------------------

    async def update_weights(self, weights: Weights, version: int) -> None:
        """See `Sampler.update_weights`. Requests wait meanwhile; `on_update` says what becomes of those in flight.

        A server that does not take the weights is out until it has them, as one that is launched only now. Raises
        SamplerError when none is left.
        """
        start = time.perf_counter()
        async with self._updating:
            self._resting = False
            self._woken.notify_all()
            members = self.fleet.serving
            self.open.clear()
            try:
                await self._each(members, lambda engine: engine.restore("weights"))
                await self._pause(members)
                await self._send(members, weights, version)
                await self._each(members, lambda engine: engine.restore("kv_cache"))
            finally:
                try:
                    await self._each(members, Engine.resume)
                finally:
                    self.open.set()
        await self.fleet.available()
        self._counts["update_seconds"] += time.perf_counter() - start

    async def _pause(self, members: Sequence[Member]) -> None:
        """Servers that end requests when they pause look once a second whether all have. Here they have before."""
        how = self.options.on_update
        waiting = [member for member in members if member.engine.aborts(how)]
        for _ in range(PAUSE_TRIES):
            waiting = [member for member in waiting if member.in_flight and member.state is State.SERVING]
            if not waiting:
                break
            await self._each(waiting, Engine.abort_all)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.gather(*(member.idle.wait() for member in waiting)), PAUSE_SECONDS)
        await self._each(members, lambda engine: engine.pause(how))

    @property
    def shares_devices(self) -> bool:
        """See `Sampler.shares_devices`."""
        return self.options.colocate

    async def rest(self) -> None:
        """See `Sampler.rest`: with `colocate`, free the servers' weights, keys and values. Servers of our own that are
        out end, and are launched again at the next update."""
        if not self.options.colocate:
            return
        async with self._updating:
            self._resting = True
            await self._each(self.fleet.serving, Engine.release)
            out = [member for member in self.fleet.members if member.launched and member.state is State.JOINING]
            await asyncio.gather(*(member.close() for member in out))

    async def _send(self, members: Sequence[Member], weights: Weights, version: int) -> None:
        live: dict[Server, Member] = {member.engine: member for member in members if _runs(member)}
        busy = self.options.on_update == "keep" and any(member.in_flight for member in live.values())
        empty = any("kv_cache" in member.engine.released for member in live.values())
        named = self._keeping(checkpoint_names(weights, self._settings.model_type))
        try:
            failures = await self._bring(list(live), named, version, flush=not busy and not empty)
            await asyncio.to_thread(deque, named, 0)  # what is left when no server was
        except BaseException as cause:  # whatever they hold now
            for member in live.values():
                await self.fleet.quarantine(member, cause)
            raise
        self._version = version
        for engine, error in failures.items():
            await self.fleet.quarantine(live[engine], error)

    def _keeping(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        """The same weights, each also copied for servers that come back or join, as the learner changes its own."""
        self._whole = False
        for name, tensor in weights:
            if name not in self._kept:  # page-locked, so that a GPU copies at full speed; once, as that takes long
                self._kept[name] = _buffer(tensor)
            self._kept[name].copy_(tensor.detach(), non_blocking=True)
            yield name, tensor
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        self._whole = True

    async def _bring(
        self, servers: Sequence[Server], weights: Weights, version: int, *, flush: bool = True
    ) -> Failures:
        if not self.options.verify_weights:
            return await self._sender.send(servers, weights, version, flush=flush)
        connected = [member.engine.info for member in self.fleet.members if member.engine.info]
        gpu = any(info.get("device") != "cpu" for info in connected)
        checked = Checked(weights, self._dtype, gpu=gpu)
        failed = dict(await self._sender.send(servers, checked, version, flush=flush))
        return failed | await checked.verify([server for server in servers if server not in failed])

    async def _each(self, members: Sequence[Member], call: Callable[[Engine], Awaitable[None]]) -> None:
        """One call for each member that serves, or that has requests left; those that fail are quarantined."""
        serving = [member for member in members if _runs(member)]
        results = await asyncio.gather(*(call(member.engine) for member in serving), return_exceptions=True)
        for member, result in zip(serving, results, strict=True):
            if isinstance(result, SamplerError):
                await self.fleet.quarantine(member, result)
            elif isinstance(result, BaseException):
                raise result

    # What sessions need -----------------------------------------------------------------------------------------------

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Raises SamplerError for a request that a server would refuse, or die of."""
        size = self._settings.vocab_size
        if not prompt or min(prompt) < 0 or max(prompt) >= size:
            raise SamplerError(f"a prompt must be ids below {size}, at least one; got {list(prompt)[:20]}")
        if (total := len(prompt) + params.max_new_tokens) > self.max_context:
            raise SamplerError(
                f"{len(prompt)} prompt tokens and max_new_tokens = {params.max_new_tokens} are {total}; the servers "
                f"take {self.max_context}: lower rollout.max_new_tokens or raise context_length in sampler.server_args"
            )

    def read_versions(self, piece: Piece, *, asked_at: int) -> list[int]:
        """Policy versions of tokens. Servers that do not say get the version at which they were asked: never too new.

        Raises:
            BadReply: tokens of weights that this run has not sent.
        """
        last = piece.last if piece.token_ids else None
        for version in filter(None, {*piece.versions} - {None} or {last}):
            if not version.lstrip("-").isdigit() or not asked_at <= int(version) <= self._version:
                raise BadReply(
                    f"tokens are of weights {version!r}, but {asked_at} to {self._version} were sent; does another "
                    "trainer update this server, or did somebody start it anew?"
                )
        return [int(version) if version else asked_at for version in piece.versions]

    def stop_length(self, ids: Sequence[int], before: int, stop: Sequence[str]) -> int | None:
        """How many ids there are when a stop string is complete that began before the last `len(ids) - before` of them.

        Servers look for stop strings only in what one request samples.
        """
        decode = self._context.tokenizer.decode
        longest = max(len(string.encode()) for string in stop)  # tokens have a byte at least
        start = max(0, before - longest)
        for end in range(before + 1, min(len(ids), before + longest) + 1):
            text = decode(list(ids[start:end]), skip_special_tokens=False)
            if any(string in text for string in stop):
                return end
        return None

    async def failed(self, member: Member, error: SamplerError) -> None:
        """Take a server out that does not answer, or fails several times in a row; bad requests are not its fault."""
        status = error.status if isinstance(error, EngineError) else 0
        silent = status is None
        member.strikes += status != 400
        self._counts["failures"] += 1
        if silent or member.strikes >= STRIKES:
            await self.fleet.quarantine(member, error)

    def count(self, member: Member, piece: Piece, *, prompt_tokens: int) -> None:
        """Take note of a good reply."""
        member.strikes = 0
        self._counts["requests"] += 1
        self._counts["prompt_tokens"] += prompt_tokens
        self._counts["cached_tokens"] += piece.cached_tokens
        self._counts["generated_tokens"] += len(piece.token_ids)
        self._counts["aborts"] += piece.finish is FinishReason.ABORT

    def expert_rows(self, flat: NDArray[np.int32] | None) -> NDArray[np.int32] | None:
        """[n, layers * top_k] → [n, MoE layers, top_k]."""
        return None if flat is None else flat.reshape(len(flat), -1, self._settings.num_experts_per_tok)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something nobody waits for; its failure is logged."""
        task = asyncio.ensure_future(_logged(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def metrics(self) -> Mapping[str, float]:
        """Since the last call: requests, tokens of prompts, of those read from the prefix cache, and generated; aborted
        and failed requests, seconds of weight updates, and how often a server was taken out. Servers that serve."""
        counts, self._counts = self._counts, defaultdict(float)
        outages, self.fleet.outages = self.fleet.outages, 0
        return {**counts, "outages": float(outages), "servers": float(len(self.fleet.serving))}


async def _together(calls: Iterable[Awaitable[None]]) -> None:
    """Await all; none goes on when one has failed."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _logged(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except SamplerError as error:
        log.debug("%s", error)


def _runs(member: Member) -> bool:
    return member.state in (State.SERVING, State.DRAINING)


def _buffer(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def _raise_first(failures: Mapping[Any, Exception]) -> None:
    for error in failures.values():
        raise error
