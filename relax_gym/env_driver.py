"""Drives one environment through one episode: sync or async, off the loop, timed, closed exactly once."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from relax_gym.env import Env, StepResult, check_reset, check_step
from relax_gym.errors import EnvError
from relax_gym.registry import make
from relax_gym.types import Message, Task
from relax_gym.workers import Worker, WorkerThreads, WorkerTimeout, within

T = TypeVar("T")
log = logging.getLogger("relax_gym")


class EnvFailure(Exception):
    """An env raised, hung or returned nonsense. The cause is the original exception."""

    def __init__(self, cause: Exception, *, timed_out: bool = False) -> None:
        super().__init__(str(cause) if timed_out else f"{type(cause).__name__}: {cause}")
        self.timed_out = timed_out


class EnvDriver:
    """One env instance, built, played and closed."""

    def __init__(self, task: Task, threads: WorkerThreads, step_timeout: float) -> None:
        self.task = task
        self.env: Env | None = None
        self.seconds = 0.0
        self._threads = threads
        self._own_thread: Worker | None = None
        self._timeout = step_timeout
        self._closed = False

    async def build(self) -> Env:
        """Build the env. Raises EnvFailure."""
        self.env = env = await self._run("constructor", self._build)
        if env.thread_affinity:
            self._own_thread = self._threads.new_worker()
        return env

    async def reset(self) -> tuple[list[Message], dict[str, Any]]:
        """Build the env and begin the episode. Raises EnvFailure."""
        env = await self.build()
        options = None if self.task.options is None else dict(self.task.options)
        return _checked(check_reset, await self._run("reset", env.reset, seed=self.task.seed, options=options))

    async def step(self, action: str) -> StepResult:
        """Pass on what the model said. Raises EnvFailure."""
        assert self.env is not None, "reset() builds the env"
        return _checked(check_step, await self._run("step", self.env.step, action))

    async def close(self) -> None:
        """Close the env if there is one. A failing close is logged: the episode it belongs to is over."""
        env, self.env, self._closed = self.env, None, True
        if env is None:
            return
        try:
            await self._run("close", env.close)
        except EnvFailure:
            log.warning("env %s (seed %d): close() failed", self.task.env_id, self.task.seed, exc_info=True)
        finally:
            if self._own_thread is not None:
                self._own_thread.stop()

    def _build(self) -> Env:
        env = make(self.task.env_id, **self.task.kwargs)
        if self._closed:  # built too late: the episode has timed out and nobody else will close it
            env.close()
        return env

    async def _run(self, what: str, method: Callable[..., T | Awaitable[T]], *args: Any, **kwargs: Any) -> T:
        start = time.perf_counter()
        try:
            return await self._call(method, *args, **kwargs)
        except WorkerTimeout as error:
            late = TimeoutError(f"{what} took longer than rollout.step_timeout = {self._timeout:g} s")
            raise EnvFailure(late, timed_out=True) from error
        except Exception as error:
            raise EnvFailure(error) from error
        finally:
            self.seconds = time.perf_counter() - start

    async def _call(self, method: Callable[..., T | Awaitable[T]], *args: Any, **kwargs: Any) -> T:
        if inspect.iscoroutinefunction(method):
            return await within(self._timeout, method(*args, **kwargs))
        call = self._own_thread.call if self._own_thread is not None else self._threads.call
        result = await call(lambda: method(*args, **kwargs), timeout=self._timeout)
        return await within(self._timeout, result) if inspect.isawaitable(result) else result


def _checked(check: Callable[[Any], T], result: Any) -> T:
    try:
        return check(result)
    except EnvError as error:
        raise EnvFailure(error) from error
