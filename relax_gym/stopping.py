"""SIGTERM and SIGINT: the first lets a run save what it has and end, a second ends the process at once.

Not so in a process that a launcher has started: the scheduler and the launcher may both say SIGTERM, and the launcher
kills what does not end. It also says SIGTERM when another process has died, while this one closes what it has and says
which: from the run's start to the end of the process, that does not end it.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

from relax_gym.launch import launched_rank

T = TypeVar("T")
SIGNALS = (signal.SIGTERM, signal.SIGINT)


def _pass_over(number: int, frame: FrameType | None) -> None:
    """Ignore it. Unlike with signal.SIG_IGN, processes that this one starts do not, and a run that follows listens."""


class LeftUndone(Exception):
    """What was awaited has been cancelled because the run is to stop."""


class Stopping:
    """Whether somebody has asked the run to stop."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._asked = asyncio.Event()

    @property
    def asked(self) -> bool:
        """The run saves and ends as soon as it can."""
        return self._asked.is_set()

    def ask(self, number: int = signal.SIGTERM) -> None:
        """As the signal of that number does."""
        self.signal = number
        self._asked.set()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """During the block, signals ask. Only in the main thread; others get none. What is ignored stays so.

        A launched process ignores them afterwards, until it listens again.
        """
        alone = launched_rank() is None
        # signal.SIG_DFL needs no event loop that goes on, nor Python
        second = signal.SIG_DFL if alone else _pass_over
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        before = {number: signal.getsignal(number) for number in SIGNALS}
        heard = [number for number in SIGNALS if before[number] is not signal.SIG_IGN]

        def hear(number: int, frame: FrameType | None) -> None:
            for known in heard:
                signal.signal(known, second)
            loop.call_soon_threadsafe(self.ask, number)

        for number in heard:
            signal.signal(number, hear)
        try:
            yield
        finally:
            for number in heard:
                signal.signal(number, before[number] if alone else second)

    async def unless_asked(self, awaitable: Awaitable[T]) -> T:
        """Await something that can be left. What has ended nevertheless counts.

        Raises:
            LeftUndone: it was cancelled, as the run is to stop.
        """
        doing = asyncio.ensure_future(awaitable)
        asked = asyncio.ensure_future(self._asked.wait())
        try:
            await asyncio.wait({doing, asked}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            asked.cancel()
            if not doing.done():
                doing.cancel()
                await asyncio.wait({doing})
        if doing.cancelled() and self.asked:
            raise LeftUndone
        return doing.result()
