"""Closing what was opened, whatever goes wrong meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from relax_gym.errors import RelaxGymError, reason

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
            except Exception as failure:
                if error is None:
                    raise
                known = isinstance(failure, (OSError, RelaxGymError))  # such as a full disk: no traceback says more
                log.error("while the run was being closed after an error: %s", reason(failure), exc_info=not known)

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
