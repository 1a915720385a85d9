"""Runs an object on several ranks: rank 0 in this process, the others in processes of their own.

Every call is made on all ranks at the same time. When one of them raises, dies or does not come back, the call raises
an error that names it, and all ranks have ended: none is left in a collective that the others will never enter.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from relax_gym.errors import RelaxGymError, TrainingError, reason
from relax_gym.launch import launched_rank
from relax_gym.workers import Worker
from relax_gym_trainers.megatron_learner import ray_ranks
from relax_gym_trainers.megatron_learner.rank_processes import (
    GRACE_SECONDS,
    Answers,
    Other,
    join,
    meeting_point,
    serve,
    spawn,
)
from relax_gym_trainers.megatron_learner.rank_service import Failure, Parcel, Place, make

__all__ = ["Place", "Ranks", "launched_rank", "serve"]

log = logging.getLogger("relax_gym")

SETTLE_SECONDS = 1.0
"""After a rank has raised: a dead one, which may be why, is noticed within this time."""
CLOSE_SECONDS = 60.0
START = ""
"""The method whose call makes the object."""


class Ranks:
    """The object that `entry` makes, on `world` ranks.

    `entry` is "module:function", called on each rank as `function(place, *arguments)`. Rank 0's is made and used in
    one thread of its own, so that nothing that it does can block the caller for longer than a call's time limit, and
    what megatron-core keeps for each thread is right. The object's `close`, if it has one, is called at the end; after
    a failure on rank 0 only, where it must not wait for other ranks.
    """

    def __init__(
        self,
        world: int,
        entry: str,
        arguments: tuple[Any, ...] = (),
        *,
        env: Sequence[Mapping[str, str]] = (),
        logs: Path | None = None,
        launcher: Literal["processes", "ray"] = "processes",
        timeout: float = 1800.0,
        start_timeout: float = 600.0,
    ) -> None:
        """Start the other ranks, unless a launcher has, and make the object on all.

        `env` [world] is what is set in the environment of each rank's process but 0; output goes to `rank-1.log`, … in
        the folder `logs`, or to this process's. The ranks are children of this process or actors of a Ray cluster, as
        `launcher` says. `timeout` is the most seconds of a call.

        Raises:
            ConfigError: a launcher has started another number of processes.
            TrainingError: a rank cannot be started.
            RelaxGymError: what rank 0's `entry` raised.
        """
        self.world, self._timeout = world, timeout
        self._over: str | None = None
        self._running: Callable[[], Any] | None = None
        self._ended = False
        self._served: Any = None
        self._thread: int | None = None
        self._here = Worker("rank 0")
        self._others: list[Other] = []
        self._free: Callable[[], None] | None = None
        self._shared = launched_rank() is None and launcher == "processes"
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # NCCL's own would end this process
        try:
            init_method = self._start(launcher, env, logs, start_timeout)
            self._place = Place(rank=0, world=world, init_method=init_method)
            self._begin(START, (entry, arguments), start_timeout)()
        except BaseException:
            self._end()
            raise

    def _start(self, launcher: str, env: Sequence[Mapping[str, str]], logs: Path | None, timeout: float) -> str:
        """Have the other ranks; where they meet."""
        if launched_rank() is not None:
            self._others = join(self.world, time.monotonic() + timeout)
            return "env://"
        if launcher == "ray":
            cluster = ray_ranks.start(self.world, logs, timeout)
            self._store, self._others, self._free = cluster.store, cluster.others, cluster.free
            return cluster.init_method
        self._store, init_method = meeting_point()
        for rank in range(1, self.world):
            place = Place(rank=rank, world=self.world, init_method=init_method)
            self._others.append(spawn(place, env[rank] if env else {}, logs))
        return init_method

    def call(self, method: str, *arguments: Any, timeout: float | None = None) -> Any:
        """What rank 0's object returns from `method(*arguments)`, which all ranks call at the same time.

        Rank 0 takes the arguments as they are, the others take copies. What the others return is dropped.

        Raises:
            TrainingError: a rank raised or has ended, or some did not come back in time (`timeout` seconds instead of
                the usual ones); its notes have the tracebacks. All ranks have then ended.
            RelaxGymError: what rank 0 raised.
        """
        return self.begin(method, *arguments, timeout=timeout)()

    def begin(self, method: str, *arguments: Any, timeout: float | None = None) -> Callable[[], Any]:
        """Begin a `call`; what is returned waits for its end and gives its result, once. The ranks have one call at a
        time: a later one first waits for the end of this one, whose result is then lost.

        Raises:
            TrainingError: the ranks have ended. What the call raises is raised where it is waited for.
        """
        if self._running is not None:
            with contextlib.suppress(Exception):  # if it ended the ranks, that is said below
                self._running()
        if self._over is not None:
            raise TrainingError(f"{method} cannot be called: {self._over}")
        self._running = end = self._begin(method, arguments, self._timeout if timeout is None else timeout)

        def result() -> Any:
            if self._running is not end:
                raise RuntimeError(f"the result of {method} was asked for already, or is lost to a later call")
            self._running = None
            return end()

        return result

    def close(self) -> None:
        """End the other ranks. Idempotent."""
        if self._over is not None:
            return
        if hasattr(self._served, "close"):
            try:
                self.call("close", timeout=CLOSE_SECONDS)
            except RelaxGymError:
                log.warning("the ranks could not be closed in order", exc_info=True)
                return
        self._served, self._over = None, "the ranks are closed"
        for other in self._others:
            other.dismiss()
        for other in self._others:
            other.join()
        self._end()

    def _begin(self, method: str, arguments: tuple[Any, ...], timeout: float) -> Callable[[], Any]:
        parcel = Parcel((method, arguments), shared=self._shared)
        answers: Answers = queue.SimpleQueue()
        for other in self._others:
            other.ask(parcel, answers)
        self._here.post(functools.partial(self._run_here, method, arguments, answers))

        def end() -> Any:
            try:
                return self._gather(method, answers, timeout)
            except BaseException as error:
                self._over = f"the ranks have ended: {str(error) or type(error).__name__}"
                self._end()
                raise

        return end

    def _run_here(self, method: str, arguments: tuple[Any, ...], answers: Answers) -> None:
        self._thread = threading.get_ident()
        try:
            if method:
                answers.put((0, None, getattr(self._served, method)(*arguments)))
            else:
                self._served = make(self._place, *arguments)
                answers.put((0, None, None))
        except BaseException as error:
            answers.put((0, Failure.of(error), error))

    def _gather(self, method: str, answers: Answers, timeout: float) -> Any:
        """Wait for all ranks, or until something is known to be wrong."""
        waiting, failures, value = set(range(self.world)), dict[int, Failure](), None
        limit = time.monotonic() + timeout
        while waiting and not any(failure.dead for failure in failures.values()):
            try:
                rank, failure, answer = answers.get(timeout=max(0.0, limit - time.monotonic()))
            except queue.Empty:
                break
            waiting.discard(rank)
            value = answer if rank == 0 else value
            if failure is not None:
                failures[rank] = failure
                limit = min(limit, time.monotonic() + SETTLE_SECONDS)
        if not failures and not waiting:
            return value
        if not failures:
            raise self._overdue(method, sorted(waiting), timeout)
        dead = [rank for rank, failure in failures.items() if failure.dead]
        if isinstance(value, RelaxGymError) and not dead:
            error: RelaxGymError = value
        else:
            rank = (dead or list(failures))[0]
            verb = "" if dead else "failed: "
            error = self._error(f"rank {rank} of {self.world} {verb}{failures[rank].reason}", method)
        for rank, failure in failures.items():
            if failure.details and failure.reason != reason(error):
                error.add_note(f"Rank {rank}:\n{failure.details}")
        raise error

    def _overdue(self, method: str, waiting: Sequence[int], timeout: float) -> RelaxGymError:
        who = f"rank{'s' if waiting[1:] else ''} {', '.join(map(str, waiting))} of {self.world}"
        error = self._error(f"{who} did not come back within {timeout:g} s", method)
        frame = sys._current_frames().get(self._thread or -1)
        if 0 in waiting and frame is not None:
            error.add_note("Rank 0 was here:\n" + "".join(traceback.format_stack(frame)))
        for other in self._others:
            if other.rank in waiting and (stacks := other.stacks()):
                error.add_note(f"Rank {other.rank} was here:\n{stacks}")
        return error

    def _error(self, what: str, method: str) -> RelaxGymError:
        if method == START:
            return TrainingError(f"at the start, {what}; all ranks have been ended")
        return TrainingError(
            f"in {method}, {what}; all ranks have been ended. The run can go on from its last checkpoint: start it "
            "again with --resume"
        )

    def _end(self) -> None:
        """Whatever the ranks are doing. Rank 0 may be in a collective with those that are ended first. Idempotent."""
        if self._ended:
            return
        self._ended = True
        for other in self._others:
            other.kill()
        left = threading.Event()
        self._here.post(functools.partial(self._leave, left))
        self._here.stop()
        if not left.wait(SETTLE_SECONDS):
            threading.Thread(target=_abort_collectives, daemon=True).start()  # NCCL waits for the dead
            if not left.wait(GRACE_SECONDS):
                log.warning("rank 0 is still busy in its thread; it is left alone")
        for other in self._others:
            other.release()
        if self._free is not None:
            self._free()
        self._others, self._store = [], None

    def _leave(self, left: threading.Event) -> None:
        served, self._served = self._served, None
        with contextlib.suppress(Exception):
            if hasattr(served, "close"):
                served.close()
        left.set()


def _abort_collectives() -> None:
    import torch.distributed as dist

    with contextlib.suppress(Exception):
        dist.distributed_c10d._abort_process_group()
