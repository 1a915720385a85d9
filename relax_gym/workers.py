"""Runs what may hang without taking anybody else down: blocking calls in daemon threads, coroutines in own tasks."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import itertools
import logging
import queue
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable, Iterator
from concurrent import futures
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, cast
from weakref import WeakSet

T = TypeVar("T")
Jobs: TypeAlias = "queue.SimpleQueue[Callable[[], None] | None]"
log = logging.getLogger("relax_gym")
LEAVING = 10.0
"""Seconds that something which was cancelled has for ending."""
in_threads: WeakSet[asyncio.Future[Any]] = WeakSet()
"""The calls of workers that somebody waits for: a loop whose time is simulated must not jump while they work."""
CLOSED = "asked for more than there was time for: the items are closed"


class WorkerTimeout(TimeoutError):
    """A call ran longer than its limit. Not raised for a TimeoutError of the function itself."""


class WorkerCancelled(RuntimeError):
    """What was awaited has ended as cancelled, though whoever awaits it was not."""


async def within(seconds: float | None, awaitable: Awaitable[T]) -> T:
    """Await with a limit that holds even for what ignores its cancellation.

    Raises:
        WorkerTimeout: it runs out. A TimeoutError of the awaited code passes as it is.
        WorkerCancelled: the awaited code has cancelled itself, or awaited something that was.
    """
    doing = asyncio.ensure_future(awaitable)
    try:
        await asyncio.wait({doing}, timeout=seconds)
        if not doing.done():
            raise WorkerTimeout(f"took longer than {seconds:g} seconds")
    finally:
        await let_go(doing)
    if doing.cancelled():
        raise WorkerCancelled("it cancelled itself")
    return doing.result()


async def let_go(doing: asyncio.Future[Any]) -> None:
    """Cancel what has not ended, and wait until it has: not for ever, it may ignore that."""
    if doing.done() or (doing.cancel() and doing.done()):
        return
    try:
        await asyncio.wait({doing}, timeout=LEAVING)
    finally:
        if not doing.done():
            leave_behind(doing)
    if doing.done() and not doing.cancelled() and (error := doing.exception()):
        log.warning("failed while it was being cancelled", exc_info=error)


_left: set[asyncio.Future[Any]] = set()


def leave_behind(doing: asyncio.Future[Any], what: object = None) -> None:
    """Nobody waits any more for what was cancelled and does not end: not even `asyncio.run`."""
    _left.add(doing)
    doing.add_done_callback(_forget)
    asyncio._unregister_task(cast("asyncio.Task[Any]", doing))
    log.warning("%r was cancelled and does not end; it is left behind", what or doing)


def _forget(late: asyncio.Future[Any]) -> None:
    _left.discard(late)
    if not late.cancelled() and (error := late.exception()):
        log.warning("failed after it was left behind", exc_info=error)


async def awaited(value: Awaitable[T]) -> T:
    """Any awaitable as a coroutine, which is what `asyncio.run` takes."""
    return await value


@dataclass(slots=True, eq=False)
class _Call:
    awaitable: Awaitable[Any]
    answer: asyncio.Future[tuple[Any, BaseException | None]]
    begun: bool = False


class OwnTask:
    """One task that awaits one thing after the other, for what may ignore that it is cancelled: it is left behind then.

    What is entered in one call can be left in another, as in the task of the caller.
    """

    def __init__(self) -> None:
        self._calls: asyncio.Queue[_Call | None] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def call(self, awaitable: Awaitable[T], timeout: float | None = None) -> T:
        """What it gives. Raises WorkerTimeout when it takes longer and has been cancelled, or left behind."""
        call = _Call(awaitable, asyncio.get_running_loop().create_future())
        self._calls.put_nowait(call)
        if self._task is None:
            self._task = asyncio.create_task(self._work(self._calls))
        try:
            await asyncio.wait({call.answer}, timeout=timeout)
        except asyncio.CancelledError:
            await self._interrupt(call, self._task)
            raise
        if not call.answer.done():
            await self._interrupt(call, self._task)
            raise WorkerTimeout(f"took longer than {timeout:g} seconds")
        value, error = call.answer.result()
        if error is not None:
            raise error
        return cast("T", value)

    def stop(self) -> None:
        """End the task after the calls it has."""
        self._calls.put_nowait(None)

    @staticmethod
    async def _work(calls: asyncio.Queue[_Call | None]) -> None:
        own = asyncio.current_task()
        while (call := await calls.get()) is not None:
            if call.answer.cancelled():
                continue
            call.begun = True
            try:
                outcome: tuple[Any, BaseException | None] = await call.awaitable, None
            except BaseException as error:  # SystemExit in a task would end the loop
                outcome = None, error
            while own is not None and own.cancelling():
                own.uncancel()
            call.answer.set_result(outcome)
            del call, outcome

    async def _interrupt(self, call: _Call, task: asyncio.Task[None]) -> None:
        if not call.begun:
            call.answer.cancel()
            if asyncio.iscoroutine(call.awaitable):
                call.awaitable.close()
        if call.answer.done():
            return
        task.cancel()
        try:
            await asyncio.wait({call.answer}, timeout=LEAVING)
        finally:
            if not call.answer.done():
                self.stop()
                self._calls, self._task = asyncio.Queue(), None
                leave_behind(task, call.awaitable)


class Worker:
    """One daemon thread that runs jobs one after the other, from a queue that it shares with others if given one."""

    def __init__(self, name: str, jobs: Jobs | None = None) -> None:
        self._jobs: Jobs = queue.SimpleQueue() if jobs is None else jobs
        threading.Thread(target=self._work, name=name, daemon=True).start()

    async def call(self, function: Callable[..., T], *args: Any, timeout: float | None = None) -> T:
        """Run `function(*args)` here. Raises WorkerTimeout when it takes longer; the thread then is still busy."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        in_threads.add(future)
        self._jobs.put(functools.partial(_run, functools.partial(function, *args), loop, future))
        return await within(timeout, future)

    async def finish(self) -> None:
        """Wait for what it was given before, also where nobody waits for that any more."""
        await self.call(lambda: None)

    def post(self, job: Callable[[], None]) -> None:
        """Run a job that nobody waits for, after those that are here already. It must not raise."""
        self._jobs.put(job)

    def stop(self) -> None:
        """End the thread after the jobs it has."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job


class Streamed(Iterator[T]):
    """Items that are computed in a worker's thread, each when it is asked for. Whoever asks waits: not an event loop.

    After `close` none is computed any more, and nobody waits: neither for a worker that has stopped nor for one that is
    stuck.
    """

    def __init__(self, worker: Worker, make: Callable[[], Iterable[T]]) -> None:
        self._worker, self._make = worker, make
        self._items: Iterator[T] | None = None
        self._answer: futures.Future[list[T]] | None = None
        self._lock, self._closed = threading.Lock(), False

    def __next__(self) -> T:
        """Raises RuntimeError after `close`."""
        answer: futures.Future[list[T]] = futures.Future()
        with self._lock:
            if self._closed:
                raise RuntimeError(CLOSED)
            self._answer = answer
            self._worker.post(functools.partial(self._compute, answer))
        for item in answer.result():
            return item
        raise StopIteration

    def _compute(self, answer: futures.Future[list[T]]) -> None:
        try:
            if self._items is None:
                self._items = iter(self._make())
            answer.set_result(list(itertools.islice(self._items, 1)))
        except futures.InvalidStateError:  # nobody has waited any more
            pass
        except BaseException as error:
            with contextlib.suppress(futures.InvalidStateError):
                answer.set_exception(error)

    def close(self) -> None:
        """Leave the rest; what is being computed is finished. Idempotent."""
        with self._lock:
            if not self._closed:
                self._worker.post(self._drop)
                if self._answer is not None:
                    with contextlib.suppress(futures.InvalidStateError):  # it is there already
                        self._answer.set_exception(RuntimeError(CLOSED))
            self._closed = True

    def _drop(self) -> None:
        items, self._items = self._items, None
        if isinstance(items, Generator):
            items.close()


def _run(function: Callable[[], Any], loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any]) -> None:
    try:
        result, error = function(), None
    except BaseException as raised:  # SystemExit in user code must not kill the thread silently
        result, error = None, raised
    try:
        loop.call_soon_threadsafe(_resolve, future, result, error)
    except RuntimeError:  # the loop is closed
        _log_unheard(error)
    del function, future, result, error


def _log_unheard(error: BaseException | None) -> None:
    if error is not None:
        log.warning("a call failed in its thread after its caller had stopped waiting for it", exc_info=error)


def _resolve(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        _log_unheard(error)
        return
    if error is None:
        future.set_result(result)
    elif isinstance(error, Exception) and not isinstance(error, StopIteration):
        future.set_exception(error)
    else:  # a future cannot carry StopIteration, and SystemExit or KeyboardInterrupt would end the loop
        wrapped = RuntimeError(f"{type(error).__name__} raised in a worker thread: {error}")
        wrapped.__cause__ = error
        future.set_exception(wrapped)


class WorkerThreads:
    """Lends idle workers; a worker whose call timed out or was cancelled is never lent again.

    At most `limit` threads are lent at once; callers above that wait their turn (waiting does not count as run time).
    Who takes a worker for itself holds one of `slots` until it is given back or known to stay away.
    """

    def __init__(self, name: str, limit: int = 256) -> None:
        self.slots = asyncio.Semaphore(limit)
        self._name = name
        self._idle: list[Worker] = []
        self._started = 0

    async def call(self, function: Callable[..., T], *args: Any, timeout: float | None = None) -> T:
        """Run `function(*args)` in some thread. Raises WorkerTimeout when it runs longer than `timeout` seconds."""
        async with self.lend() as worker:
            return await worker.call(function, *args, timeout=timeout)

    @contextlib.asynccontextmanager
    async def lend(self) -> AsyncIterator[Worker]:
        """A worker for one call, as soon as there is one."""
        async with self.slots:
            worker = self.take()
            try:
                yield worker
            except (WorkerTimeout, asyncio.CancelledError):
                worker.stop()  # it may be stuck in user code for ever; its thread ends when that code does
                raise
            except BaseException:
                self.give_back(worker)
                raise
            self.give_back(worker)

    def take(self) -> Worker:
        """An idle worker, or a new one. The caller gives it back, or keeps and stops it."""
        if self._idle:
            return self._idle.pop()
        self._started += 1
        return Worker(f"{self._name}-{self._started}")

    def give_back(self, worker: Worker) -> None:
        """Lend the worker to others again. It must be idle."""
        self._idle.append(worker)

    def close(self) -> None:
        """End the idle threads. Stuck ones are daemons and die with the process."""
        while self._idle:
            self._idle.pop().stop()


class _LoopThread:
    """A thread, the event loop that is run in it, and whether it is in a call."""

    def __init__(self, name: str) -> None:
        self.worker = Worker(name)
        self.coroutines = asyncio.Runner()
        self.busy = False


class LimitedThread:
    """Lets synchronous code call functions that may hang, coroutine functions too: in one thread, with a limit each."""

    def __init__(self, name: str, seconds: float) -> None:
        self.saw_coroutines = False
        self._name, self._seconds = name, seconds
        self._waiting = asyncio.Runner()
        self._thread = _LoopThread(name)

    def __enter__(self) -> LimitedThread:
        return self

    def __exit__(self, *error: object) -> None:
        self._leave(1.0)
        self._waiting.close()

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What the function returns. Raises TimeoutError when it hangs; later calls are then made in a new thread."""
        try:  # a coroutine's own limit comes first: it is cancelled and its thread can go on
            job = functools.partial(self._run, self._thread, function, *args, **kwargs)
            return self._waiting.run(self._thread.worker.call(job, timeout=self._seconds + 0.5))
        except WorkerTimeout as error:
            if self._thread.busy:
                self._leave(0.0)
                self._thread = _LoopThread(self._name)
            raise TimeoutError(f"{function.__name__} took longer than {self._seconds:g} s") from error

    def _leave(self, seconds: float) -> None:
        """The thread closes its loop and ends, once it can."""
        with contextlib.suppress(WorkerTimeout):
            self._waiting.run(self._thread.worker.call(self._thread.coroutines.close, timeout=seconds))
        self._thread.worker.stop()

    def _run(self, thread: _LoopThread, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        thread.busy = True  # of this thread: one that was left behind may come back during a later call
        try:
            result = function(*args, **kwargs)
            if inspect.isawaitable(result):
                self.saw_coroutines = True
                result = thread.coroutines.run(within(self._seconds, result))
            return result
        finally:
            thread.busy = False
