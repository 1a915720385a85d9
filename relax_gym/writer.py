"""Writes groups to the run folder in a thread of its own: neither the event loop nor the learner waits for that."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from relax_gym.errors import RunFolderError
from relax_gym.run_folder import RunFolder
from relax_gym.types import Group
from relax_gym.workers import Worker


class Writer:
    """Makes calls in the order in which they were posted. Once the disk has refused one none is made any more."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._thread = Worker("writer")
        self._error: BaseException | None = None
        self._failed = False

    def add_group(self, step: int, group: Group, *, kind: str) -> None:
        """As `RunFolder.add_group`, soon."""
        self.post(self.folder.add_group, step, group, kind=kind)

    def post(self, function: Callable[..., object], *args: object, **kwargs: object) -> None:
        """Have a call made that nobody waits for."""
        self._thread.post(partial(self._make, partial(function, *args, **kwargs)))

    async def written(self) -> None:
        """Wait for all that was posted by now. Raises what the first that failed has raised, once."""
        await self._thread.call(self._check)

    async def close(self) -> None:
        """The same, and wait for media that are still being written."""
        try:
            await self._thread.call(self.folder.close)
            await self.written()
        finally:
            self._thread.stop()

    def _make(self, call: Callable[[], object]) -> None:
        if self._failed:
            return
        try:
            call()
        except BaseException as error:  # what an env leaves in its info may raise anything
            self._error = self._error or error
            self._failed = isinstance(error, RunFolderError)

    def _check(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error
