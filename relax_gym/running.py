"""Runs an event loop to its end, whatever hangs in it."""

from __future__ import annotations

import asyncio
import functools
import logging
import queue
from collections.abc import Callable, Coroutine, Iterable
from concurrent import futures
from typing import Any, ParamSpec, TypeVar

from relax_gym import workers
from relax_gym.workers import Jobs, Worker, leave_behind, let_go

log = logging.getLogger("relax_gym")

P = ParamSpec("P")
T = TypeVar("T")
ROUNDS = 3
MOST_THREADS = 32
"""That an event loop has for `asyncio.to_thread`, as in Python's own pool."""


def run(main: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, but a task or a thread that hangs keeps neither this call nor the process from ending."""
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        loop.set_default_executor(DaemonThreads())
        try:
            return runner.run(main)
        finally:
            try:
                for _ in range(ROUNDS):  # what is cancelled may begin tasks
                    runner.run(_end(asyncio.all_tasks(loop)))
            finally:  # a second Ctrl-C: the runner would wait for them without limit
                for task in asyncio.all_tasks(loop):
                    leave_behind(task)


async def _end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    await asyncio.gather(*map(let_go, tasks))


class DaemonThreads(futures.ThreadPoolExecutor):
    """Python's own pool waits for its threads when the event loop is closed, and again when the process ends."""

    def __init__(self) -> None:
        super().__init__()
        self._jobs: Jobs = queue.SimpleQueue()
        self._workers: list[Worker] = []
        self._calls: dict[futures.Future[Any], object] = {}

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> futures.Future[T]:
        """As that pool does."""
        call: futures.Future[T] = futures.Future()
        self._calls[call] = fn
        call.add_done_callback(lambda done: self._calls.pop(done, None))
        if len(self._workers) < min(len(self._calls), MOST_THREADS):
            self._workers.append(Worker(f"asyncio_{len(self._workers)}", self._jobs))
        self._jobs.put(functools.partial(_answer, call, functools.partial(fn, *args, **kwargs)))
        return call

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads, waiting for what they do as long as something that was cancelled has for ending."""
        if wait:
            calls = dict(self._calls)
            for late in futures.wait(calls, timeout=workers.LEAVING).not_done:
                log.warning("%r does not end in its thread; it is left behind", calls[late])
        for worker in self._workers:
            worker.stop()


def _answer(call: futures.Future[T], function: Callable[[], T]) -> None:
    if not call.set_running_or_notify_cancel():
        return
    try:
        call.set_result(function())
    except BaseException as error:  # whoever waits for it gets it
        call.set_exception(error)
