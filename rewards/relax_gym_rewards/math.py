"""Is the last action mathematically equal to the reference? Checked in processes that can be killed."""

from __future__ import annotations

import importlib.util
import logging
import re
import threading
from collections.abc import Mapping
from enum import StrEnum

from relax_gym.errors import RewardError
from relax_gym.isolation import Isolated, Killed
from relax_gym.types import Trajectory
from relax_gym_rewards._answers import answer_text, boxed, references, stated_answer

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

    An answer that takes longer than `timeout` seconds or more than 1024 MiB to check, or crashes the checker, scores
    0.0 and is counted in `metrics()`. The checks run in the processes that all isolated rewards share, at least
    `workers` of them. A script that uses this reward needs `if __name__ == "__main__":`, as for any process pool.
    """

    name = "math"

    def __init__(self, *, field: str = "answer", timeout: float = 5.0, workers: int = 2) -> None:
        if not timeout > 0 or workers < 1:
            raise RewardError(
                f"{self.name}: timeout is {timeout} and workers {workers}; they must be above 0 and at least 1"
            )
        if importlib.util.find_spec("math_verify") is None:  # not imported: the main process has no use for it
            raise RewardError(f"{self.name} needs math_verify; run: pip install 'relax-gym[rewards]'")
        self.field, self.timeout = field, timeout
        self._share = Isolated(workers=workers, prepare=prepare)
        self._lock = threading.Lock()
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
        try:
            return Verdict(await self._share.call(check, given, expected, seconds=self.timeout))
        except Killed as killed:
            with self._lock:
                self._counts["timeouts" if killed.timed_out else "crashes"] += 1
            return Verdict.DIFFERENT

    def metrics(self) -> Mapping[str, float]:
        """Answers that ran into the time limit and answers that crashed the checker, since the last call."""
        with self._lock:
            counts, self._counts = self._counts, dict.fromkeys(self._counts, 0)
        return {name: float(count) for name, count in counts.items()}

    def close(self) -> None:
        """End the processes unless others use them. Idempotent; the next check starts new ones."""
        self._share.close()


def prepare() -> None:
    """The first check of a process takes seconds, most of them for imports; no answer shall pay for that."""
    check(r"\boxed{\frac{1}{2}}", "0.5")


def check(given: str, expected: str) -> str:
    """Runs in a process of the pool."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limit is off
    return compare(given, expected)


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
