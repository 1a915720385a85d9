"""The other side of `ranks`: a process that waits for calls of rank 0, and how these travel."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import mmap
import os
import pickle
import queue
import signal
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

from relax_gym.errors import reason

POLL_SECONDS = 0.2
ALIGNMENT = 64
SMALL = 4096
"""Bytes up to which an array travels within the pickled message."""
SHOW_STACKS = signal.SIGUSR1
"""Makes a rank write where its threads are into its log."""

Link = Connection


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank is: its number of how many, and where they meet (an `init_method` of `init_process_group`)."""

    rank: int
    world: int
    init_method: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What a rank answers when it raised, or what is said of one that has ended (`dead`)."""

    reason: str
    details: str = ""
    dead: bool = False

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Of an error that is being handled."""
        return cls(reason=reason(error), details="".join(traceback.format_exception(error)))


class Parcel:
    """A pickled message for several processes. When `shared`, large arrays are written once into a file in memory that
    processes of this machine map; each copies only the pages that it writes to."""

    def __init__(self, message: object, *, shared: bool) -> None:
        buffers: list[memoryview] = []

        def within(buffer: pickle.PickleBuffer) -> bool:
            raw = buffer.raw()
            if raw.nbytes > SMALL:
                buffers.append(raw)
            return raw.nbytes <= SMALL

        self._head = pickle.dumps(message, 5, buffer_callback=within if shared else None)
        self._sizes = [buffer.nbytes for buffer in buffers]
        if not buffers:
            return
        self._file = _memory_file()
        weakref.finalize(self, os.close, self._file)  # what was sent stays valid
        with open(self._file, "wb", closefd=False) as file:
            for start, buffer in zip(_starts(self._sizes), buffers, strict=False):
                file.seek(start)
                file.write(buffer)

    def send(self, link: Link) -> None:
        """Raises OSError when the other side is gone."""
        link.send(self._sizes)
        link.send_bytes(self._head)
        if self._sizes:
            send_handle(link, self._file, os.getpid())


def send_end(link: Link) -> None:
    """No more messages: the other side returns from `serve_link`."""
    link.send(None)


def _receive(link: Link) -> tuple[bytes, list[memoryview]] | None:
    """What `pickle.loads` takes, or None at the end."""
    sizes = link.recv()
    if sizes is None:
        return None
    head = link.recv_bytes()
    if not sizes:
        return head, []
    file = recv_handle(link)
    try:
        mapped = memoryview(mmap.mmap(file, 0, access=mmap.ACCESS_COPY))
    finally:
        os.close(file)
    return head, [mapped[start : start + size] for start, size in zip(_starts(sizes), sizes, strict=False)]


def _starts(sizes: list[int]) -> list[int]:
    return list(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))


def _memory_file() -> int:
    """A file without a name. Not in /dev/shm, which is tiny in many containers."""
    if sys.platform == "linux":
        return os.memfd_create("relax-gym")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def make(place: Place, entry: str, arguments: tuple[Any, ...]) -> Any:
    """What `entry` ("module:function") gives for this rank."""
    module, _, function = entry.partition(":")
    return getattr(importlib.import_module(module), function)(place, *arguments)


def serve_link(link: Link, place: Place, *, parent: int | None, linger: Callable[[], object] = bool) -> None:
    """Make the object, then its methods' calls, until rank 0 ends it. The process ends when rank 0 is gone, whatever
    it is doing, or `parent`, a pid: a process that rank 0's has forked may hold its side of the link open. `linger` is
    called before, in case something else ends rank 0 when this process ends, before it has said what went wrong."""
    messages: queue.SimpleQueue[tuple[bytes, list[memoryview]] | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(link, messages, parent, linger), daemon=True).start()
    served: Any = None
    while (message := messages.get()) is not None:
        failure = None
        try:
            method, arguments = pickle.loads(message[0], buffers=message[1])
            if method:
                getattr(served, method)(*arguments)
            else:
                served = make(place, *arguments)
        except BaseException as error:  # also SystemExit: rank 0 must hear of anything
            failure = Failure.of(error)
        message = arguments = None
        with contextlib.suppress(OSError):  # `_read` sees to it
            link.send(failure)
    link.close()


def _read(link: Link, messages: queue.SimpleQueue[Any], parent: int | None, linger: Callable[[], object]) -> None:
    try:
        while True:
            while not link.poll(POLL_SECONDS):
                if parent is not None and os.getppid() != parent:
                    os._exit(1)
            messages.put(message := _receive(link))
            if message is None:
                return
            del message
    except (EOFError, OSError):
        linger()
        os._exit(1)


def main(link: int, parent: int, rank: int, world: int, init_method: str) -> None:
    """A process that `Ranks` has started; `link` is a file descriptor."""
    os.set_inheritable(link, False)
    faulthandler.register(SHOW_STACKS, all_threads=True)
    serve_link(Connection(link), Place(rank=rank, world=world, init_method=init_method), parent=parent)
