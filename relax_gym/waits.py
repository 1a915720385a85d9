"""Who waits for what, since when, and for how long at most."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Wait:
    """Somebody waits for something. `since` is monotonic; `seconds` is how long that may last, if it is limited."""

    what: str
    who: str
    since: float
    seconds: float | None

    def describe(self, now: float) -> dict[str, Any]:
        """As status.json has it."""
        return {"what": self.what, "who": self.who, "for": round(now - self.since, 3), "limit": self.seconds}

    def __str__(self) -> str:
        return f"{self.what} ({self.who}) for {time.monotonic() - self.since:.1f} s"


class Waits:
    """The waits there are at this moment; any thread may read them."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._now: dict[int, Wait] = {}

    @contextmanager
    def on(self, what: str, who: str, seconds: float | None = None) -> Iterator[Callable[[float], None]]:
        """During the block, `who` waits for `what`. Calling what is given sets a new limit, which counts from then."""
        number = next(self._numbers)

        def limit(seconds: float | None) -> None:
            self._now[number] = Wait(what, who, time.monotonic(), seconds)

        limit(seconds)
        try:
            yield limit
        finally:
            del self._now[number]

    def longest_first(self) -> list[Wait]:
        """All of them."""
        return sorted(self._now.values(), key=lambda wait: wait.since)


current: ContextVar[Waits | None] = ContextVar("waits", default=None)
"""Those of the run that a task belongs to."""


@contextmanager
def waiting(what: str, who: str) -> Iterator[Callable[[float], None]]:
    """Say that `who` waits for `what` during the block, which calls what it is given with its limit once that counts:
    not while it waits for its turn. No-op outside a run."""
    waits = current.get()
    if waits is None:
        yield lambda seconds: None
        return
    with waits.on(what, who) as limit:
        yield limit
