"""What a run waits for, since when and until when, so that nothing waits for ever and somebody can say what hangs.

The loop waits within `Supervisor.wait`, which ends the run when the time is over. Episodes say what they wait for with
`waits.waiting`; their own limits act on it. A thread of its own writes all of it to `status.json`, also when the event
loop is held up, and ends the process when that lasts.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from relax_gym.disk import write_atomically
from relax_gym.errors import Stopped, StuckError, first_cause, reason
from relax_gym.supervision_config import SupervisionConfig
from relax_gym.waits import Waits, current
from relax_gym.workers import LEAVING, let_go

T = TypeVar("T")
log = logging.getLogger("relax_gym")
STATUS_FILE = "status.json"
BLOCKED_EXIT_CODE = 3
"""How a process ends whose event loop was held up for too long."""
ENDED = ("Z", "X")
"""States in /proc of processes that have ended."""


class Supervisor:
    """Watches one run. Used as an async context manager, in the task that the run's other tasks are started from.

    Args:
        folder: where status.json appears, at most once a second and at the end.
        facts: called in the event loop for what else the status says.
    """

    def __init__(self, config: SupervisionConfig, folder: Path, facts: Callable[[], Mapping[str, Any]]) -> None:
        self.waits = Waits()
        self.state = "running"
        self.error: str | None = None
        self.lag = 0.0
        self._warn_above = 1.0
        self._config, self._folder, self._facts = config, folder, facts
        self._known: Mapping[str, Any] = {}
        self._beat = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="supervisor", daemon=True)

    async def __aenter__(self) -> Supervisor:
        self._token = current.set(self.waits)
        self._loop_thread = threading.get_ident()
        self._known = self._facts()
        self._pulse = asyncio.create_task(self._beating())
        self._write()
        self._thread.start()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._pulse.cancel()
        self._ended.set()
        self._thread.join(LEAVING)  # not in a thread: all there are may be stuck
        current.reset(self._token)
        if self.state == "running":
            cause = error and first_cause(error)
            self.state = "finished" if error is None else "stopped" if isinstance(cause, Stopped) else "failed"
            self.error = None if cause is None else reason(cause)
        self._known = self._facts()
        self._write()

    async def wait(self, what: str, limit: str, awaitable: Awaitable[T]) -> T:
        """Await something for at most as long as the config's `limit` says.

        Raises:
            StuckError: it took longer. Names it, and what was waited for longest on its behalf.
        """
        seconds: float = getattr(self._config, limit)
        doing = asyncio.ensure_future(awaitable)
        with self.waits.on(what, "the loop", seconds):
            try:
                await asyncio.wait({doing}, timeout=seconds)
                if not doing.done():
                    raise StuckError(self._late(what, f"supervision.{limit} = {seconds:g} s"))
            finally:
                await let_go(doing)
        return doing.result()

    async def close(self, what: str, closing: Callable[[], Awaitable[object]]) -> None:
        """Close a part. One that takes too long is named in the log and left: what is closed after it still is."""
        try:
            await self.wait(f"{what}, to be closed", "close", closing())
        except StuckError as error:
            log.error("%s; it is left as it is", error)

    def last_lag(self) -> float:
        """Most seconds that the event loop was late by since the last call."""
        lag, self.lag = self.lag, 0.0
        return lag

    def _late(self, what: str, limit: str) -> str:
        others = [wait for wait in self.waits.longest_first() if wait.who != "the loop"]
        behind = "; it waits for " + ", ".join(map(str, others[:3])) if others else ""
        return f"{what} took longer than {limit}{behind}; raise the limit if that is normal here"

    async def _beating(self) -> None:
        facts_at = 0.0
        while True:
            start = self._beat = time.monotonic()
            if start - facts_at >= 1:
                self._known, facts_at = self._facts(), start
            await asyncio.sleep(0.05)
            self._was_late(time.monotonic() - start - 0.05)

    def _was_late(self, seconds: float) -> None:
        self.lag = max(self.lag, seconds)
        if seconds > self._warn_above:
            self._warn_above = 2 * seconds
            log.warning(
                "the event loop was late by %.1f s, in which no episode went on: a hook, a tracker or async code of an "
                "env or reward works or waits there without await; do that in a thread (sync envs and rewards have "
                "one, else asyncio.to_thread)",
                seconds,
            )

    # In the supervisor's thread --------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._ended.wait(1.0):
            self._write()
            blocked = time.monotonic() - self._beat
            if blocked > self._config.loop and not self._ended.is_set():
                self._end_process(blocked)

    def _write(self) -> None:
        now = time.monotonic()
        status = {
            "pid": os.getpid(),
            "pid_started": process_start(os.getpid()),
            "host": socket.gethostname(),
            "written": time.time(),
            "state": self.state,
            "error": self.error,
            "loop_blocked": round(max(0.0, now - self._beat - 0.05), 3) if not self._ended.is_set() else 0.0,
            "waits": [wait.describe(now) for wait in self.waits.longest_first()[:20]],
            **self._known,
        }
        try:
            write_atomically(self._folder / STATUS_FILE, json.dumps(status, indent=2).encode())
        except OSError as error:  # a full disk ends the run where it matters
            log.warning("cannot write %s: %s", self._folder / STATUS_FILE, error)

    def _end_process(self, blocked: float) -> None:
        """Nothing in the event loop can: it is what does not go on."""
        self.state = "failed"
        self.error = f"the event loop was blocked for {blocked:.0f} s (supervision.loop); run.log has where"
        log.error("%s", self.error)
        with (self._folder / "run.log").open("a") as file:
            faulthandler.dump_traceback(file=file, all_threads=True)
        self._write()
        os._exit(BLOCKED_EXIT_CODE)


def process_start(pid: int) -> str | None:
    """What tells a process from a later one with the same id; None of one that has ended, even if nobody has waited for
    it yet, and where the system does not say (no /proc)."""
    try:
        state, *others = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state in ENDED else others[18]
    except (OSError, ValueError, IndexError):
        return None
