"""Closing what was opened, whatever goes wrong meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

log = logging.getLogger("relax_gym")


class Cleanup(contextlib.AsyncExitStack):
    """Calls everything added, last first, even when some of it raises. The first failure is the one that is raised."""

    def add(self, close: Callable[[], Any]) -> None:
        """Call `close` at the end; what it returns is awaited if it can be."""

        async def leave(
            kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
        ) -> None:
            try:
                if inspect.isawaitable(pending := close()):
                    await pending
            except Exception:
                if error is None:
                    raise
                log.exception("while the run was being closed after an error")

        self.push_async_exit(leave)


@contextlib.contextmanager
def closed_on_failure() -> Iterator[Cleanup]:
    """What is built one after the other in the block is closed when the rest of it fails. For synchronous code."""
    built = Cleanup()
    try:
        yield built
    except BaseException as error:
        asyncio.run(_leave(built, error))
        raise


async def _leave(built: Cleanup, error: BaseException) -> None:
    await built.__aexit__(type(error), error, error.__traceback__)
