"""The processes of the other ranks, as rank 0 sees them: its own children, or those that a launcher has started."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

from relax_gym.errors import ConfigError, TrainingError
from relax_gym.launch import launched_rank
from relax_gym.workers import Worker
from relax_gym_trainers.megatron_learner.rank_service import (
    POLL_SECONDS,
    SHOW_STACKS,
    Failure,
    Link,
    Parcel,
    Place,
    send_end,
    serve_link,
)

GRACE_SECONDS = 10.0
LINGER_SECONDS = 20.0
"""A launcher ends all when one has ended: rank 0 has this long to close what it has and to say what went wrong, if the
launcher does not say SIGTERM before."""
STACK_SECONDS = 3.0
SHOWN_LINES = 15
RENDEZVOUS_KEY = "relax_gym/ranks"
BOOT = (
    "import json, sys; sys.path[:], *place = json.loads(sys.argv[1]); "
    "from relax_gym_trainers.megatron_learner.rank_service import main; main(*place)"
)

Answers = queue.SimpleQueue[tuple[int, Failure | None, Any]]
"""Ranks, what failed there, and what rank 0's method returned or raised."""


def serve() -> None:
    """What a launched rank but the first runs instead of the trainer. Returns when rank 0 closes its `Ranks`.

    Raises ConfigError when rank 0 needs another number of ranks. Should rank 0 end without any `Ranks`, its exit code
    must not be 0, or the launcher would let the others wait for it.
    """
    main = threading.current_thread() is threading.main_thread()
    if main:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 sees to Ctrl-C
    store = _rendezvous(timedelta(days=7))  # rank 0 may have much to prepare; the launcher knows when it has ended
    told = json.loads(store.get(RENDEZVOUS_KEY))
    if isinstance(told, str):
        raise ConfigError(told)
    host, port, key = told
    place = Place(rank=launched_rank() or 0, world=int(os.environ["WORLD_SIZE"]), init_method="env://")
    link = connect((host, port), bytes.fromhex(key), place)
    linger = _outlive_sigterm() if main else functools.partial(time.sleep, LINGER_SECONDS)
    serve_link(link, place, parent=None, linger=linger)


def _outlive_sigterm() -> Callable[[], object]:
    """SIGTERM, which a launcher sends to all ranks, no longer ends this one: rank 0 saves with its help and ends it.

    Returns what waits LINGER_SECONDS, but not longer than until SIGTERM has come, be it before.
    """
    heard, hearing = os.pipe()
    os.set_blocking(hearing, False)
    signal.set_wakeup_fd(hearing)  # written to even while a computation keeps Python from running a handler
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    return lambda: select.select([heard], [], [], LINGER_SECONDS)


def connect(address: tuple[str, int], key: bytes, place: Place) -> Link:
    """Join rank 0, which `listen`s."""
    link = _prompt(Client(address, authkey=key))
    link.send(place.rank)
    return link


def _prompt(link: Link) -> Link:
    """Without the 40 ms that TCP holds small messages back."""
    with socket.socket(fileno=os.dup(link.fileno())) as same:
        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return link


class Other:
    """A rank in another process, and the thread that talks with it. One that a launcher started has no `process`."""

    def __init__(
        self,
        rank: int,
        link: Link,
        process: subprocess.Popen[bytes] | None = None,
        log: Path | None = None,
        log_start: int = 0,
    ) -> None:
        self.rank, self._link, self._process, self._log, self._log_start = rank, link, process, log, log_start
        self._dismissed = threading.Event()
        self._worker = Worker(f"rank {rank}")

    def ask(self, parcel: Parcel, answers: Answers) -> None:
        self._worker.post(functools.partial(self._ask, parcel, answers))

    def _ask(self, parcel: Parcel, answers: Answers) -> None:
        try:
            parcel.send(self._link)
            del parcel  # its memory
            while not self._link.poll(POLL_SECONDS):
                if self._process is not None and self._process.poll() is not None:
                    raise EOFError  # a process that was forked meanwhile may hold the link open
            failure = self._link.recv()
        except (EOFError, OSError):
            failure = Failure(reason=self._obituary(), details=self._last_lines(), dead=True)
        answers.put((self.rank, failure, None))

    def dismiss(self) -> None:
        """It ends by itself."""
        self._worker.post(self._dismiss)

    def _dismiss(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            send_end(self._link)
            if self._link.poll(GRACE_SECONDS):
                self._link.recv()  # raises: the other side closes it
        self._dismissed.set()

    def join(self) -> None:
        """Wait until it has ended, but not for ever."""
        self._dismissed.wait(GRACE_SECONDS)
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_SECONDS)

    def kill(self) -> None:
        """It ends at once, with what it has started."""
        if self._process is None:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._link.fileno())) as link:
                link.shutdown(socket.SHUT_RDWR)
        elif self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # it may be stuck in a driver
                self._process.wait(GRACE_SECONDS)

    def release(self) -> None:
        self._worker.post(self._link.close)
        self._worker.stop()

    def stacks(self) -> str:
        """Where its threads are, when its output goes to a file."""
        if self._process is None or self._log is None:
            return ""
        self._log_start = self._log.stat().st_size
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(SHOW_STACKS)
        deadline = time.monotonic() + STACK_SECONDS
        while self._log.stat().st_size == self._log_start and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        time.sleep(POLL_SECONDS)
        return self._last_lines(100)

    def _obituary(self) -> str:
        if self._process is None:
            return "has closed its connection; see the launcher's output"
        try:
            code = self._process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            return "has closed its connection"
        if code < 0:
            hint = " (often the machine running out of memory)" if code == -signal.SIGKILL else ""
            return f"was ended by {signal.Signals(-code).name}{hint}"
        return f"ended with exit code {code}"

    def _last_lines(self, count: int = SHOWN_LINES) -> str:
        if self._log is None:
            return ""
        with open(self._log, "rb") as file:
            file.seek(self._log_start)
            lines = file.read().decode(errors="replace").splitlines()[-count:]
        return "\n".join([f"The end of {self._log}:", *lines])


def spawn(place: Place, env: Mapping[str, str], logs: Path | None) -> Other:
    """A fresh interpreter in a session of its own, which Ctrl-C does not reach."""
    mine, theirs = socket.socketpair()
    log, size = None, 0
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)
        log = logs / f"rank-{place.rank}.log"
        size = log.stat().st_size if log.exists() else 0
    with theirs, open(log, "ab") if log else contextlib.nullcontext() as stdout:
        argument = json.dumps([sys.path, theirs.fileno(), os.getpid(), place.rank, place.world, place.init_method])
        process = subprocess.Popen(
            [sys.executable, "-c", BOOT, argument],
            env={**os.environ, "PYTHONUNBUFFERED": "1", **env},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.STDOUT if stdout else None,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    return Other(place.rank, Link(mine.detach()), process, log, size)


def meeting_point(host: str = "127.0.0.1") -> tuple[Any, str]:
    """A store at a port that nobody else can have taken, and how ranks find it. It ends when it is dropped.

    `host` is this machine's address as all ranks reach it.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    # Asked for port 0, torch loses a store that gets the port of an earlier one, and rank 0 cannot join it.
    store = TCPStore(
        host, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=listener.detach()
    )
    return store, f"tcp://{host}:{port}"


def _rendezvous(timeout: timedelta) -> Any:
    """The launcher's store."""
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(rendezvous("env://", timeout=timeout))
    return store


def check_launched(world: int) -> None:
    """Raise ConfigError when a launcher has started another number of processes."""
    if (launched := int(os.environ["WORLD_SIZE"])) != world:
        raise ConfigError(
            f"{launched} processes were started (WORLD_SIZE), but the learner's layout has {world} ranks: "
            f"tp · pp · cp · dp must be {launched}; or start one process, which starts the others itself"
        )


def join(world: int, deadline: float) -> list[Other]:
    """The ranks that a launcher has started and that `serve`."""
    store = _rendezvous(timedelta(minutes=5))
    try:
        check_launched(world)
    except ConfigError as refusal:
        store.set(RENDEZVOUS_KEY, json.dumps(str(refusal)))
        raise
    one_host = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    host = "127.0.0.1" if one_host else os.environ["MASTER_ADDR"]
    listener, key = listen("127.0.0.1" if one_host else "", world)
    store.set(RENDEZVOUS_KEY, json.dumps([host, listener.address[1], key.hex()]))
    links = accept(listener, world, deadline)
    store.delete_key(RENDEZVOUS_KEY)
    return [Other(rank, links[rank]) for rank in range(1, world)]


def listen(host: str, world: int) -> tuple[Listener, bytes]:
    """Where the other ranks connect to, and the key that they need. `host` is "" for all interfaces."""
    key = secrets.token_bytes(32)
    return Listener((host, 0), backlog=world, authkey=key), key


def accept(
    listener: Listener, world: int, deadline: float, check: Callable[[], None] = lambda: None
) -> dict[int, Link]:
    """The links to ranks 1 to `world` - 1, each of which says its rank first. `check` raises when one cannot come.

    Raises TrainingError when some have not joined at `deadline`.
    """
    joined: queue.SimpleQueue[tuple[int, Link]] = queue.SimpleQueue()
    threading.Thread(target=_accept, args=(listener, world - 1, joined), daemon=True).start()
    links: dict[int, Link] = {}
    while len(links) < world - 1:
        try:
            rank, link = joined.get(timeout=1.0)
            links[rank] = link
        except queue.Empty:
            check()
            if time.monotonic() > deadline:
                missing = sorted(set(range(1, world)) - set(links))
                raise TrainingError(f"ranks {missing} of {world} did not join; do they run `serve`?") from None
    return links


def _accept(listener: Listener, count: int, joined: queue.SimpleQueue[tuple[int, Link]]) -> None:
    with listener:
        while count:
            with contextlib.suppress(OSError, EOFError, AuthenticationError):  # not one of ours
                link = _prompt(listener.accept())
                joined.put((link.recv(), link))
                count -= 1
