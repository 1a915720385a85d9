"""The pool of killable processes that all rewards share which compute much, or might never end.

Processes are spawned, as forking a program with threads is unsafe. A script that uses them needs
`if __name__ == "__main__":`, as for any process pool.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import inspect
import itertools
import multiprocessing
import os
import pickle
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, InvalidStateError
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_gym.errors import RewardError, reason
from relax_gym.reward import GroupReward, Reward, Score, is_group_reward
from relax_gym.types import Trajectory
from relax_gym.workers import awaited

if TYPE_CHECKING:
    from pebble import ProcessFuture, ProcessPool

GLANCE, GRACE = 0.5, 1.0
SECONDS, MEMORY = 10.0, 1024
MIB = 2**20
ALARM = getattr(signal, "SIGALRM", 0)


class Killed(RewardError):
    """A call exceeded a limit or ended its process. `timed_out` says whether time was what it ran out of."""

    def __init__(self, message: str, *, timed_out: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out


class Isolated:
    """A share in the pool. Processes start with a call and end when all shares that made calls are closed, or with the
    program, however that ends.

    May be used from any thread and event loop. The pool has as many processes as the share with most `workers` asks
    for, and each calls what all shares have to `prepare` (a function of a module) before the clock of its first call
    starts.
    """

    def __init__(self, *, workers: int = 2, prepare: Callable[[], object] | None = None) -> None:
        if importlib.util.find_spec("pebble") is None:
            raise RewardError("pebble not installed; run: pip install 'relax-gym[rewards]'")
        self._token = _SHARED.join(workers, prepare)
        weakref.finalize(self, _SHARED.left.append, self._token)

    async def call(
        self, function: Callable[..., Any], *args: Any, seconds: float = SECONDS, memory: int = MEMORY
    ) -> Any:
        """`function(*args)` in a process of its own, all of them picklable. Cancelling this ends the process.

        Raises:
            Killed: it took longer than `seconds`, more than `memory` MiB (on Linux), recursed too deep, or crashed.
            RewardError: the processes cannot run.
            Whatever else the function raises.
        """
        future = asyncio.wrap_future(_SHARED.schedule(self._token, function, args, seconds, memory))
        try:
            return await future
        except (TimeoutError, MemoryError, RecursionError, BrokenExecutor) as error:
            raise _killed(error, seconds, memory) from error
        except Exception as error:
            if _exit_code(error) is None:
                raise
            raise _killed(error, seconds, memory) from error
        finally:
            future.cancel()

    def close(self) -> None:
        """End the processes unless others use them. Idempotent; the next call starts new ones."""
        _SHARED.rest(self._token)


class _Shared:
    """What all shares have in common in this process.

    Attributes:
        left: Shares that were garbage-collected. That happens in any thread, whatever locks it holds: it is only noted.
    """

    def __init__(self) -> None:
        self.left: deque[int] = deque()
        self._lock, self._tokens = threading.RLock(), itertools.count()
        self._wanted: dict[int, tuple[int, Callable[[], object] | None]] = {}
        self._users: set[int] = set()
        self._pool: ProcessPool | None = None
        self._jobs: set[ProcessFuture[Any]] = set()

    def join(self, workers: int, prepare: Callable[[], object] | None) -> int:
        with self._lock:
            token = next(self._tokens)
            self._wanted[token] = (workers, prepare)
            return token

    def schedule(
        self, token: int, function: Callable[..., Any], args: tuple[Any, ...], seconds: float, memory: int
    ) -> ProcessFuture[Any]:
        with self._lock:
            self._users.add(token)
            new = self._pool is None or not self._pool.active
            if new:
                self._pool, self._jobs = self._started(), set()
            assert self._pool is not None
            jobs = self._jobs
            job = self._pool.schedule(_run, args=(function, args, seconds + GRACE, memory), timeout=seconds)
            jobs.add(job)
            job.add_done_callback(jobs.discard)
            if new:
                threading.Thread(target=self._watch, args=[self._pool, jobs], daemon=True).start()
            return job

    def _watch(self, pool: ProcessPool, jobs: set[ProcessFuture[Any]]) -> None:
        """End the processes when the last share is gone; and pebble forgets some of the jobs of a pool that breaks, and
        whoever waits for them would for ever."""
        while pool.active:
            time.sleep(GLANCE)
            if self.left:
                self.rest()
        with self._lock:
            forgotten = list(jobs)
        for job in forgotten:
            with contextlib.suppress(InvalidStateError):
                job.set_exception(BrokenExecutor("they have ended"))

    def rest(self, *tokens: int) -> None:
        """End the processes when no other shares use them."""
        with self._lock:
            self._users.difference_update(tokens)
            self._count()
            if self._users or self._pool is None:
                return
            pool, self._pool = self._pool, None
        _stop(pool)

    def _count(self) -> None:
        """Leave out those that are gone."""
        while self.left:
            token = self.left.popleft()
            self._wanted.pop(token, None)
            self._users.discard(token)

    def _started(self) -> ProcessPool:
        from pebble import ProcessPool

        if self._pool is not None:
            _stop(self._pool)
        self._count()
        preparations = {prepare for _, prepare in self._wanted.values() if prepare is not None}
        return ProcessPool(
            max(workers for workers, _ in self._wanted.values()),
            initializer=_start,
            initargs=[preparations],
            context=multiprocessing.get_context("spawn"),
        )


_SHARED = _Shared()


class IsolatedReward:
    """A reward whose every call is made in the pool, on a copy of it: what it counts or caches is gone afterwards.

    It has `seconds` (10 s unless it says otherwise) and `memory` (1024 MiB, likewise), attributes of the reward.
    """

    def __init__(self, reward: Reward | GroupReward) -> None:
        self.reward, self.key = reward, getattr(reward, "key", None)
        self._seconds, self._memory = getattr(reward, "seconds", SECONDS), getattr(reward, "memory", MEMORY)
        self._share = Isolated()
        _pickled(reward)  # tried now, before the run

    async def __call__(self, trajectory: Trajectory, /) -> Score:
        answer: Score = await self._ask("__call__", trajectory)
        return answer

    async def _ask(self, method: str, argument: Any) -> Any:
        payload = await asyncio.to_thread(_pickled, (self.reward, method, argument))
        return await self._share.call(_evaluate, payload, seconds=self._seconds, memory=self._memory)

    def close(self) -> None:
        """End the processes unless others use them."""
        self._share.close()


class IsolatedGroupReward(IsolatedReward):
    """The same for one of groups."""

    async def score_group(self, trajectories: Any, /) -> Any:
        """As the reward's own."""
        return await self._ask("score_group", trajectories)


def isolated(reward: Any) -> Any:
    """The reward, made to run in the pool when its attribute `isolated` is true. Raises RewardError if it cannot."""
    if not getattr(reward, "isolated", False):
        return reward
    return IsolatedGroupReward(reward) if is_group_reward(reward) else IsolatedReward(reward)


def _pickled(value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:  # of anybody's __reduce__
        raise RewardError(
            f"an isolated reward and its episodes travel to another process, but: {reason(error)}; define its class at "
            "the top of a module and keep what cannot be pickled out of its attributes"
        ) from error


def _evaluate(payload: bytes) -> Any:
    reward, method, argument = pickle.loads(payload)
    value = getattr(reward, method)(argument)
    return asyncio.run(awaited(value)) if inspect.isawaitable(value) else value


def _killed(error: BaseException, seconds: float, memory: int) -> RewardError:
    code = _exit_code(error)
    if isinstance(error, TimeoutError) or code == -ALARM:
        return Killed(f"took longer than {seconds:g} s in its process, which was ended", timed_out=True)
    if isinstance(error, MemoryError):
        return Killed(f"needed more than {memory} MiB")
    if isinstance(error, RecursionError):
        return Killed("recursed too deep")
    if code is not None:
        return Killed(f"crashed its process (exit code {code})")
    return RewardError(
        f"the processes of isolated rewards cannot run: {error}; where they cannot start, put what your script does "
        "under `if __name__ == '__main__':`, because they import it"
    )


def _exit_code(error: BaseException) -> int | None:
    """Of the process that died, when that is what the error says."""
    from pebble import ProcessExpired

    return int(error.exitcode) if isinstance(error, ProcessExpired) else None


def _stop(pool: ProcessPool) -> None:
    pool.stop()  # type: ignore[no-untyped-call]
    pool.join()


# ---- in the processes ------------------------------------------------------------------------------------------------


def _start(preparations: Iterable[Callable[[], object]]) -> None:
    threading.Thread(target=_die_with_parent, daemon=True).start()
    for prepare in preparations:
        prepare()


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run(function: Callable[..., Any], args: tuple[Any, ...], seconds: float, memory: int) -> Any:
    """The kernel ends the process after `seconds`, even inside a C loop, parent or not."""
    if ALARM:
        signal.signal(ALARM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        with _memory_limit(memory):
            return function(*args)
    finally:
        if ALARM:
            signal.setitimer(signal.ITIMER_REAL, 0)


@contextlib.contextmanager
def _memory_limit(mib: int) -> Iterator[None]:
    """So much address space more than there is now; no limit where the kernel does not say how much that is."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        yield
        return
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    now = int(statm.read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    wanted = now + mib * MIB
    allowed = wanted if before[1] == resource.RLIM_INFINITY else min(wanted, before[1])
    resource.setrlimit(resource.RLIMIT_AS, (allowed, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
