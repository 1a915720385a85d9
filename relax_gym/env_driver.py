"""Drives one environment through one episode: sync or async, off the loop, timed, closed exactly once."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Any, TypeVar

from relax_gym.env import Env, StepResult, attribute, check_reset, check_step
from relax_gym.errors import EnvError
from relax_gym.registry import make
from relax_gym.timeline import now, span
from relax_gym.types import Message, Task, Tool
from relax_gym.waits import waiting
from relax_gym.workers import OwnTask, Worker, WorkerThreads, WorkerTimeout, awaited

T = TypeVar("T")
log = logging.getLogger("relax_gym")


class EnvFailure(Exception):
    """An env raised, hung or returned nonsense. The cause is the original exception."""

    def __init__(self, cause: BaseException, *, timed_out: bool = False) -> None:
        super().__init__(str(cause) if timed_out else f"{type(cause).__name__}: {cause}")
        self.timed_out = timed_out


class EnvDriver:
    """One env instance, built, played and closed.

    The thread that builds an env remains its own if the env has `thread_affinity`; otherwise any thread will do. What
    is async is awaited in one task of its own: neither a thread nor a task that is stuck holds the episode up.
    """

    def __init__(self, task: Task, threads: WorkerThreads, step_timeout: float) -> None:
        self.task = task
        self.env: Env | None = None
        self.seconds = 0.0
        self._threads = threads
        self._worker: Worker | None = None
        self._coroutines = OwnTask()
        self._timeout = step_timeout
        self._limit: Callable[[float], None] = lambda seconds: None
        self._closed = self._stuck = False
        self._handover = threading.Lock()

    async def build(self) -> Env:
        """Build the env. Raises EnvFailure."""
        await self._run("constructor", self._construct())
        return self._built()

    async def reset(self) -> tuple[list[Message], dict[str, Any]]:
        """Build the env and begin the episode. Raises EnvFailure."""
        env = await self.build()
        options = None if self.task.options is None else dict(self.task.options)
        return _checked(
            check_reset, await self._run("reset", self._call(env.reset, seed=self.task.seed, options=options))
        )

    async def step(self, action: str) -> StepResult:
        """Pass on what the model said. Raises EnvFailure."""
        return _checked(check_step, await self._run("step", self._call(self._built().step, action)))

    async def act(self, method: str) -> str:
        """What the env's `expert_action` or `random_action` would say now. Raises EnvFailure."""
        found = self._attribute(method)
        if found is None:
            raise EnvFailure(EnvError(f"the env has no {method}()"))
        action = await self._run(method, self._call(found))
        if not isinstance(action, str):
            raise EnvFailure(EnvError(f"{method} returned {action!r:.100}; it must return text"))
        return action

    def offers(self, method: str) -> bool:
        """Whether the env has this optional method. Raises EnvFailure."""
        return self._attribute(method) is not None

    def tools(self) -> list[Tool]:
        """The tools that the model is shown. Raises EnvFailure."""
        tools: list[Tool] = self._attribute("tools", (), list)
        return tools

    async def close(self) -> None:
        """Close the env if there is one. A failing close is logged: the episode it belongs to is over.

        An env whose own thread is stuck is closed there once it comes back, which nobody waits for.
        """
        with self._handover:
            env, self.env, self._closed = self.env, None, True
        try:
            if env is not None and self._worker is not None and self._stuck:
                self._worker.post(functools.partial(self._close_here, env))
            elif env is not None:
                await self._run("close", self._call(env.close))
        except EnvFailure:
            self._log_failing_close()
        finally:
            self._coroutines.stop()
            if self._worker is not None:
                self._worker.stop()

    def _built(self) -> Env:
        assert self.env is not None, "build() or reset() comes first, close() last"
        return self.env

    def _attribute(self, name: str, default: Any = None, convert: Callable[[Any], Any] = lambda value: value) -> Any:
        try:
            return convert(attribute(self._built(), name, default))
        except (Exception, SystemExit) as error:
            raise EnvFailure(error) from error

    async def _construct(self) -> None:
        async with self._threads.slots:
            self._worker = worker = self._threads.take()
            self._limit(self._timeout)
            await worker.call(self._make, timeout=self._timeout)
            if not attribute(self._built(), "thread_affinity", False):
                self._worker = None
                self._threads.give_back(worker)

    def _make(self) -> None:
        """Runs in the worker. What it makes belongs to the driver at once, so that no cancellation can lose it."""
        env = make(self.task.env_id, **self.task.kwargs)
        with self._handover:
            if not self._closed:
                self.env = env
                return
        self._close_here(env)  # made too late: the episode is over and nobody else will close this env

    def _close_here(self, env: Env) -> None:
        """Runs in the worker."""
        try:
            closing = env.close()  # type: ignore[func-returns-value]
            if inspect.isawaitable(closing):
                asyncio.run(awaited(closing))
        except (Exception, SystemExit):
            self._log_failing_close()

    async def _run(self, what: str, call: Awaitable[T]) -> T:
        start, who = now(), f"env {self.task.env_id}, seed {self.task.seed}"
        try:
            with waiting(f"{what}()", who) as self._limit, span("env", call=what):
                return await call
        except WorkerTimeout as error:
            late = TimeoutError(f"{what} took longer than rollout.step_timeout = {self._timeout:g} s")
            raise EnvFailure(late, timed_out=True) from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise EnvFailure(error) from error  # the env's own: nobody has cancelled the episode
        except (Exception, SystemExit) as error:
            raise EnvFailure(error) from error
        finally:
            self.seconds = now() - start

    async def _call(self, method: Callable[..., T | Awaitable[T]], *args: Any, **kwargs: Any) -> T:
        if inspect.iscoroutinefunction(method):
            return await self._own(method(*args, **kwargs))
        lending = self._threads.lend() if self._worker is None else nullcontext(self._worker)
        try:
            async with lending as worker:
                self._limit(self._timeout)
                result = await worker.call(lambda: method(*args, **kwargs), timeout=self._timeout)
        except WorkerTimeout:
            self._stuck = True
            raise
        return await self._own(result) if inspect.isawaitable(result) else result

    async def _own(self, awaitable: Awaitable[T]) -> T:
        self._limit(self._timeout)
        return await self._coroutines.call(awaitable, self._timeout)

    def _log_failing_close(self) -> None:
        log.warning("env %s (seed %d): close() failed", self.task.env_id, self.task.seed, exc_info=True)


def _checked(check: Callable[[Any], T], result: Any) -> T:
    try:
        return check(result)
    except EnvError as error:
        raise EnvFailure(error) from error
