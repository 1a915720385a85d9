"""What every way to send weights shares: the servers as it sees them, and one update of all of them."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

from relax_gym.errors import SamplerError
from relax_gym.sampler import Weights

FAREWELL = 5.0
"""Most seconds that a call may take whose failure changes nothing."""


class Features(Protocol):
    """What the version of a server can do."""

    @property
    def update_session(self) -> bool:
        """Whether an update must stand between `/begin_weight_update` and `/end_weight_update` (0.5.22 and newer)."""


class Server(Protocol):
    """One SGLang server over HTTP. Servers are told apart by identity."""

    @property
    def url(self) -> str:
        """Base URL."""

    @property
    def features(self) -> Features:
        """Known once connected."""

    @property
    def tp_size(self) -> int:
        """Tensor-parallel ranks."""

    @property
    def devices(self) -> Sequence[str]:
        """The GPUs of its ranks, as CUDA_VISIBLE_DEVICES names them; empty where it is not known."""

    async def post(self, path: str, body: Mapping[str, Any], *, timeout: float) -> Any:
        """The JSON reply. Raises SamplerError on any failure, `success: false` and `timeout` seconds included."""


Failures = Mapping[Server, Exception]


class WeightSender(ABC):
    """One way to bring the learner's tensors into servers."""

    @abstractmethod
    async def open(self, servers: Sequence[Server]) -> Failures:
        """Prepare for these servers; more or fewer may be sent to later. Returns those that cannot be reached so."""

    @abstractmethod
    async def send(self, servers: Sequence[Server], weights: Weights, version: int, *, flush: bool = True) -> Failures:
        """Send `weights` (read once) to all servers; each that has all of them carries `version`.

        Args:
            flush: drop cached keys and values with the last tensors. A server that is paused in place with requests
                running refuses that, so then it must be False.

        Returns:
            The servers that failed. They may hold weights of two versions and must not serve until they were sent
            all again; their version is unchanged unless only the end of the update failed.
        """

    @abstractmethod
    async def close(self) -> None:
        """Free everything. Idempotent."""


class Update:
    """One update: which servers still take part, and why others do not."""

    def __init__(self, servers: Iterable[Server], timeout: float) -> None:
        self.live = list(servers)
        self.failed: dict[Server, Exception] = {}
        self.timeout = timeout

    def drop(self, server: Server, error: Exception) -> None:
        """Go on without a server."""
        if server in self.live:
            self.live.remove(server)
            self.failed[server] = error

    async def post(self, path: str, body: Callable[[Server], dict[str, Any]]) -> None:
        """Ask all live servers at once; those that fail or do not answer in time are dropped."""
        servers = tuple(self.live)
        calls = (server.post(path, body(server), timeout=self.timeout) for server in servers)
        for server, reply in zip(servers, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(reply, SamplerError):
                self.drop(server, reply)
            elif isinstance(reply, BaseException):
                raise reply

    @asynccontextmanager
    async def session(self) -> AsyncIterator[None]:
        """Stand between begin and end where servers want it. Ends always, on failed servers too as well as it can."""
        await asyncio.gather(*(self._begin(server) for server in tuple(self.live) if server.features.update_session))
        begun = [server for server in self.live if server.features.update_session]
        try:
            yield
        finally:
            await asyncio.gather(*(self._end(server) for server in begun))

    async def _begin(self, server: Server) -> None:
        try:
            try:
                await server.post("/begin_weight_update", {}, timeout=self.timeout)
            except SamplerError as error:
                if "already open" not in str(error):
                    raise
                # Whoever opened it is gone: an update of one server is never begun twice at a time.
                await server.post("/end_weight_update", {}, timeout=self.timeout)
                await server.post("/begin_weight_update", {}, timeout=self.timeout)
        except SamplerError as error:
            self.drop(server, error)

    async def _end(self, server: Server) -> None:
        timeout = self.timeout if server in self.live else min(FAREWELL, self.timeout)
        try:
            await server.post("/end_weight_update", {}, timeout=timeout)
        except SamplerError as error:
            self.drop(server, error)
