"""The servers of a sampler: which one takes a request, which are out, which come back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum

from relax_gym.errors import SamplerError
from relax_gym_plugins.samplers.sglang.engine import Engine

log = logging.getLogger(__name__)


class State(StrEnum):
    """Of a member. Only SERVING ones get requests."""

    JOINING = "joining"
    SERVING = "serving"
    DRAINING = "draining"
    GONE = "gone"


@dataclass(eq=False, slots=True)
class Member:
    """A server and how busy we keep it. `connect` may be called again after a failure; `outages` counts those.
    `launched` ones `connect` by a launch, on those of `sampler.devices` that are its `devices`."""

    engine: Engine
    connect: Callable[[], Awaitable[None]]
    close: Callable[[], Awaitable[None]]
    launched: bool = False
    devices: str | None = None
    state: State = State.JOINING
    in_flight: int = 0
    sessions: int = 0
    ranks: Counter[int] = field(default_factory=Counter)
    strikes: int = 0
    outages: int = 0
    error: str = ""
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.idle.set()

    def take_session(self) -> int:
        """One session more; which of the server's copies of the model is to serve it."""
        rank = min(range(self.engine.dp_size), key=self.ranks.__getitem__)
        self.sessions += 1
        self.ranks[rank] += 1
        return rank

    def leave_session(self, rank: int) -> None:
        """One session less."""
        self.sessions -= 1
        self.ranks[rank] -= 1


class Fleet:
    """Routes requests. One event loop uses it."""

    def __init__(self, revive: Callable[[Member], Awaitable[None]], *, revivals: int = 3) -> None:
        """`revive` gets a failed member ready and lets it `serve`, current weights included; it is tried `revivals`
        times. `outages` counts the times that a member which served was taken out."""
        self.members: list[Member] = []
        self.outages = 0
        self._revive, self._revivals = revive, revivals
        self._changed = asyncio.Condition()
        self._tasks: dict[Member, asyncio.Task[None]] = {}

    @property
    def present(self) -> list[Member]:
        """Members that serve or may do so again."""
        return [member for member in self.members if member.state is not State.GONE]

    @property
    def serving(self) -> list[Member]:
        """Members that get requests."""
        return [member for member in self.members if member.state is State.SERVING]

    async def serve(self, member: Member) -> None:
        """Let a member serve. It must have the current weights already.

        Raises:
            SamplerError: it was removed meanwhile.
        """
        if member.state is not State.JOINING:
            raise SamplerError(f"{member.engine} cannot serve: it is {member.state}")
        member.strikes = 0
        await self._set(member, State.SERVING)

    async def remove(self, member: Member) -> None:
        """Send it nothing more, wait for what it has, and close it. One that is coming back does not."""
        if task := self._tasks.get(member):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self._set(member, State.DRAINING)
        await member.idle.wait()
        await self.drop(member)

    @contextlib.asynccontextmanager
    async def lease(self, preferred: Member | None, *, avoid: Member | None = None) -> AsyncIterator[Member]:
        """A member to send one request to: the preferred one as long as it serves, else the least busy; the one to
        `avoid` only if there is no other.

        Raises:
            SamplerError: no member serves and none can come back.
        """
        serving = await self.available()
        busyness = [(member is avoid, member is not preferred, member.in_flight, member.sessions) for member in serving]
        member = serving[busyness.index(min(busyness))]
        member.in_flight += 1
        member.idle.clear()
        try:
            yield member
        finally:
            member.in_flight -= 1
            if not member.in_flight:
                member.idle.set()

    async def available(self) -> list[Member]:
        """The members that serve, at least one: if none does, wait for those that are coming back.

        Raises:
            SamplerError: none is, with what is wrong with each.
        """
        async with self._changed:
            while not (serving := self.serving):
                if not self._tasks and all(member.state is not State.JOINING for member in self.members):
                    raise SamplerError(f"no SGLang server is left: {self.failures()}")
                await self._changed.wait()
        return serving

    async def quarantine(self, member: Member, error: BaseException) -> None:
        """Take a failed member out and try to bring it back. What it answers meanwhile is not to be used: it may hold
        weights of two versions."""
        member.outages += 1
        if member.state is not State.SERVING:
            return
        self.outages += 1
        member.error = str(error)
        log.warning("SGLang server %s is out: %s", member.engine, error)
        await self._set(member, State.JOINING)
        self._tasks[member] = asyncio.create_task(self._bring_back(member))

    async def _bring_back(self, member: Member) -> None:
        try:
            for attempt in range(1, self._revivals + 1):
                try:
                    await self._revive(member)
                except Exception as error:  # nobody awaits this task, so whatever it is ends here
                    member.error = str(error) or repr(error)
                    log.warning(
                        "SGLang server %s did not come back (%s of %s): %s",
                        member.engine,
                        attempt,
                        self._revivals,
                        error,
                    )
                else:
                    log.info("SGLang server %s serves again", member.engine)
                    return
            with contextlib.suppress(Exception):  # its own error says more
                await self.drop(member)
        finally:
            self._tasks.pop(member, None)
            async with self._changed:
                self._changed.notify_all()

    async def settled(self) -> None:
        """Wait until every failed member is back or gone."""
        await asyncio.gather(*self._tasks.values())

    async def drop(self, member: Member) -> None:
        """Close a member for good."""
        try:
            await member.close()
        finally:
            await self._set(member, State.GONE)

    async def _set(self, member: Member, state: State) -> None:
        async with self._changed:
            member.state = state
            self._changed.notify_all()

    def failures(self) -> str:
        """What is wrong with each member."""
        return (
            "; ".join(f"{member.engine}: {member.error or member.state}" for member in self.members) or "none was there"
        )

    async def aclose(self) -> None:
        """Close all members. Idempotent."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(self.drop(member) for member in self.present))
