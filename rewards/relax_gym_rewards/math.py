"""Is the last action mathematically equal to the reference? Checked in processes that can be killed."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import multiprocessing
import os
import re
import signal
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures.process import BrokenProcessPool
from enum import StrEnum
from typing import TYPE_CHECKING

from relax_gym.errors import RewardError
from relax_gym.types import Trajectory
from relax_gym_rewards._answers import answer_text, boxed, references, stated_answer

if TYPE_CHECKING:
    from pebble import ProcessFuture, ProcessPool

GRACE = 1.0
SHORT = 200
DELIMITERS = ("$", "\\boxed", "\\(", "\\[")
NOT_PLAIN = re.compile(r"[\\^_(){}\[\]A-Za-z]")


class Verdict(StrEnum):
    """What a check found."""

    EQUAL = "equal"
    DIFFERENT = "different"
    BAD_REFERENCE = "bad reference"


class Math:
    r"""1.0 when `math-verify` finds the last action equal to `info[field]` (LaTeX, fractions, sets …), else 0.0.

    The answer is what stands in the last `<answer>` tag and there in the last `\boxed{}`, else the last formula or
    number, never in the thinking. Several boxes may state a set. Of a list of references any will do.

    An answer that takes longer than `timeout` seconds to check, or crashes the checker, scores 0.0 and is counted in
    `metrics()`. The checks run in `workers` spawned processes, started by the first one; `close()` ends them, so does
    the end of the program. A script that uses this reward needs `if __name__ == "__main__":`, as for any process pool.
    """

    name = "math"

    def __init__(self, *, field: str = "answer", timeout: float = 5.0, workers: int = 2) -> None:
        if not timeout > 0 or workers < 1:
            raise RewardError(
                f"{self.name}: timeout is {timeout} and workers {workers}; they must be above 0 and at least 1"
            )
        missing = [name for name in ("math_verify", "pebble") if importlib.util.find_spec(name) is None]
        if missing:
            raise RewardError(
                f"{self.name}: {' and '.join(missing)} not installed; run: pip install 'relax-gym[rewards]'"
            )
        self.field, self.timeout, self.workers = field, timeout, workers
        self._lock = threading.Lock()
        self._pool: ProcessPool | None = None
        self._counts = {"timeouts": 0, "crashes": 0}

    async def __call__(self, trajectory: Trajectory, /) -> float:
        allowed, given = references(trajectory, self.field, self.name), answer_text(trajectory)
        verdict = Verdict.DIFFERENT
        for expected in allowed:
            verdict = await self.verdict(given, expected)
            if verdict == Verdict.EQUAL:
                break
            if verdict == Verdict.BAD_REFERENCE:
                raise RewardError(
                    f"{self.name}: info[{self.field!r}] is {expected!r:.100}, which is no mathematical expression"
                )
        return float(verdict == Verdict.EQUAL)

    async def verdict(self, given: str, expected: str) -> Verdict:
        """What a worker finds; an answer that takes too long or crashes it is different, and counted."""
        from pebble import ProcessExpired

        try:
            return Verdict(await asyncio.wrap_future(self._submit(given, expected)))
        except TimeoutError:
            return self._counted("timeouts")
        except ProcessExpired as death:
            return self._counted("timeouts" if death.exitcode == -_ALARM else "crashes")
        except BrokenProcessPool as error:
            self.close()
            raise RewardError(f"{self.name}: the checking processes cannot run: {error}") from error

    def metrics(self) -> Mapping[str, float]:
        """Answers that ran into the time limit and answers that crashed the checker, since the last call."""
        with self._lock:
            counts, self._counts = self._counts, dict.fromkeys(self._counts, 0)
        return {name: float(count) for name, count in counts.items()}

    def close(self) -> None:
        """End the processes. Idempotent; the next check starts new ones."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            _stop(pool)

    def _submit(self, given: str, expected: str) -> ProcessFuture[str]:
        from pebble import ProcessPool

        with self._lock:
            if self._pool is None or not self._pool.active:
                context = multiprocessing.get_context("spawn")
                self._pool = ProcessPool(self.workers, initializer=_start_worker, context=context)
                weakref.finalize(self, _stop, self._pool)
            return self._pool.schedule(check, args=(given, expected, self.timeout + GRACE), timeout=self.timeout)

    def _counted(self, counter: str) -> Verdict:
        with self._lock:
            self._counts[counter] += 1
        return Verdict.DIFFERENT


_ALARM = getattr(signal, "SIGALRM", 0)


def check(given: str, expected: str, limit: float) -> str:
    """Runs in a worker. The kernel ends the process after `limit` seconds, even inside a C loop, parent or not."""
    if _ALARM:
        signal.signal(_ALARM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        return compare(given, expected)
    finally:
        if _ALARM:
            signal.setitimer(signal.ITIMER_REAL, 0)


def compare(given: str, expected: str) -> Verdict:
    """Whether two texts state the same mathematical object. No time limit of its own, and no signals."""
    from math_verify import parse, verify

    given = stated_answer(given)
    box = boxed(given)
    if expected.strip() in (given.strip(), box):
        return Verdict.EQUAL
    delimited = any(mark in expected for mark in DELIMITERS)
    as_latex = not delimited and NOT_PLAIN.search(expected)
    target = parse(f"${expected}$" if as_latex else expected, parsing_timeout=None)
    if not target or all(isinstance(item, str) for item in target):
        return Verdict.BAD_REFERENCE
    readings = [given]
    if box:
        readings.append(f"\\boxed{{{box}}}")  # math-verify reads several boxes as a set
    if len(given) <= SHORT and not any(mark in given for mark in DELIMITERS):
        readings.append(f"${given.strip()}$")  # a bare formula, without the signs that say so
    equal = any(verify(target, parse(text, parsing_timeout=None), timeout_seconds=None) for text in readings)
    return Verdict.EQUAL if equal else Verdict.DIFFERENT


def _start_worker() -> None:
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limit is off
    import math_verify  # noqa: F401  (imported before the clock of the first check starts)

    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _stop(pool: ProcessPool) -> None:
    pool.stop()  # type: ignore[no-untyped-call]
    pool.join()
