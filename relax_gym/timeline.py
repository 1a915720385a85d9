"""`timeline.json` of a run folder: what learner and episodes did when, in Chrome's trace event format.

Perfetto (ui.perfetto.dev) and chrome://tracing open it. Events are lines of a JSON array and written whole lines at a
time, so that a run that is killed leaves a file that lacks its closing bracket, which the format's readers do without.
Times are those of the event loop, in microseconds since the run began or was resumed.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar, Token
from pathlib import Path
from types import TracebackType
from typing import Any

log = logging.getLogger("relax_gym")
TIMELINE_FILE = "timeline.json"
LEARNER, EPISODES = 1, 2
PROCESSES = {LEARNER: "learner", EPISODES: "episodes"}
BUFFERED = 256
"""Events that are written together."""

Event = dict[str, Any]


def now() -> float:
    """Seconds by the clock of the event loop, which a test may simulate."""
    return asyncio.get_running_loop().time()


class Timeline:
    """Writes the timeline of one run; the run's other tasks are started while it is entered.

    A file that has half of `max_mib` MiB, or is of a run that is now resumed, becomes `timeline-<number>.json`; the
    oldest of those are removed once they have more than the other half. With 0 nothing is written. A file that cannot
    be written is given up with a warning.
    """

    def __init__(self, folder: Path, max_mib: float) -> None:
        self._path = folder / TIMELINE_FILE
        self._limit = max_mib * 2**20 / 2
        self._lines: list[str] = []
        self._named: set[tuple[int, int]] = set()
        self._size = 0
        self._free: list[int] = []
        self._rows = 0
        self._counted: dict[str, Mapping[str, float]] = {}
        self._token: Token[Timeline | None] | None = None

    def __enter__(self) -> Timeline:
        self._origin = now()
        if self._limit:
            self._token = current.set(self)
            with self._giving_up():
                self._begin_file()
            self.flush()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._token is not None:
            current.reset(self._token)
        self.flush(end="\n]\n")

    def add(self, name: str, start: float, end: float, *, process: int, row: int, args: Mapping[str, Any]) -> None:
        """Something that lasted from `start` to `end`, in seconds of the event loop's clock."""
        if (process, row) not in self._named:
            self._named.add((process, row))
            title = PROCESSES[process] if process == LEARNER else f"row {row}"
            self._name("thread_name", title, process, row)
        begin = self._micros(start)
        span = {"name": name, "ph": "X", "ts": begin, "dur": self._micros(end) - begin, "pid": process, "tid": row}
        self._append({**span, "args": dict(args)} if args else span)

    def count(self, name: str, values: Mapping[str, float]) -> None:
        """Numbers that hold from now on; nothing is written if they are what they were."""
        if self._counted.get(name) != values:
            self._counted[name] = dict(values)
            self._append({"name": name, "ph": "C", "ts": self._micros(now()), "pid": LEARNER, "args": dict(values)})

    def take_row(self) -> int:
        """The lowest row of the episodes that is free."""
        if self._free:
            return heapq.heappop(self._free)
        self._rows += 1
        return self._rows

    def give_row(self, row: int) -> None:
        """It is free again."""
        heapq.heappush(self._free, row)

    def flush(self, end: str = "") -> None:
        """Write what there is, whole lines in one go."""
        if not self._limit:
            return
        lines, self._lines = self._lines, []
        content = "".join(f"{',' if self._size + at else '['}\n{line}" for at, line in enumerate(lines)) + end
        with self._giving_up():
            with self._path.open("ab") as file:
                self._size += file.write(content.encode())
            if not end and self._size > self._limit:
                with self._path.open("ab") as file:
                    file.write(b"\n]\n")
                self._begin_file()

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            log.warning("cannot write %s, which ends here: %s", self._path, error)
            self._limit = 0

    def _begin_file(self) -> None:
        if self._path.exists():
            *_, newest = (0, *map(_number, earlier_timelines(self._path.parent)))
            os.replace(self._path, self._path.with_name(f"timeline-{newest + 1}.json"))
        earlier = earlier_timelines(self._path.parent)
        while len(earlier) > 1 and sum(path.stat().st_size for path in earlier) > self._limit:
            earlier.pop(0).unlink()
        self._size = 0
        self._named.clear()
        for process, title in PROCESSES.items():
            self._name("process_name", title, process, 0)

    def _name(self, what: str, title: str, process: int, row: int) -> None:
        self._append({"name": what, "ph": "M", "pid": process, "tid": row, "args": {"name": title}})

    def _append(self, event: Event) -> None:
        if not self._limit:
            return
        self._lines.append(json.dumps(event, separators=(",", ":")))
        if len(self._lines) >= BUFFERED:
            self.flush()

    def _micros(self, time: float) -> int:
        return round((time - self._origin) * 1e6)


current: ContextVar[Timeline | None] = ContextVar("timeline", default=None)
"""That of the run which a task belongs to."""
_row: ContextVar[int] = ContextVar("row")


@contextmanager
def learner_span(name: str, **args: Any) -> Iterator[None]:
    """The block as a span of the learner's row, which is written at once. No-op outside a run."""
    start = now()
    try:
        yield
    finally:
        add_learner_span(name, start, now(), **args)


def add_learner_span(name: str, start: float, end: float, **args: Any) -> None:
    """As `learner_span`, of what is over."""
    if (timeline := current.get()) is not None:
        timeline.add(name, start, end, process=LEARNER, row=1, args=args)
        timeline.flush()


@contextmanager
def episode_row(name: str) -> Iterator[None]:
    """A row for an episode while it lasts, on which its task then has its spans. No-op outside a run."""
    timeline = current.get()
    if timeline is None:
        yield
        return
    row = timeline.take_row()
    token = _row.set(row)
    try:
        with span("episode", id=name):
            yield
    finally:
        _row.reset(token)
        timeline.give_row(row)


@contextmanager
def span(name: str, **args: Any) -> Iterator[None]:
    """The block as a span of the row that the running episode has. No-op where there is none."""
    timeline, row = current.get(), _row.get(None)
    if timeline is None or row is None:
        yield
        return
    start = now()
    try:
        yield
    finally:
        timeline.add(name, start, now(), process=EPISODES, row=row, args=args)


def count(name: str, **values: float) -> None:
    """A counter's values from now on. No-op outside a run."""
    if (timeline := current.get()) is not None:
        timeline.count(name, values)


def earlier_timelines(folder: Path) -> list[Path]:
    """What was the timeline of a run folder before `timeline.json`, oldest first."""
    return sorted((path for path in folder.glob("timeline-*.json") if _number(path)), key=_number)


def _number(path: Path) -> int:
    found = re.fullmatch(r"timeline-(\d+)", path.stem)
    return int(found[1]) if found else 0


def read_timeline(path: Path) -> list[Event]:
    """The events of a timeline. One that a killed run has left lacks its end, and may have half a line there."""
    lines = [line.removesuffix(",") for line in path.read_text(errors="replace").splitlines() if line.startswith("{")]
    events: list[Event] = [json.loads(line) for line in lines[:-1]]
    with suppress(ValueError):
        events += [json.loads(line) for line in lines[-1:]]
    return events
