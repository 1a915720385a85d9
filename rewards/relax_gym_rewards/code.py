"""Does the program in the last action pass its tests? Run where it can read only files of Python and the system."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import sys
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from relax_gym.errors import RewardError
from relax_gym.types import Trajectory
from relax_gym_rewards._answers import answer_text, choice_option
from relax_gym_rewards._episode import reference
from relax_gym_rewards._sandbox import Limits, run, script
from relax_gym_rewards._sandbox_child import PASSED, UNSUPPORTED

SYSTEM_PYTHON = "/usr/bin/python3"
BLOCK = re.compile(r"```[^\n]*\n(.*?)```", re.DOTALL)


class Code:
    """The share of `info[field]` that the program passes, or with `score = "all"` 1.0 only when it passes all of them.

    The program is the last block between fences, or the whole text without one. A test is a mapping with `input` and
    `output`, for a program that reads and prints, or a text with assertions that call functions of the program. The
    text runs in a sandbox of its own; plain values (numbers, texts, lists, tuples, sets, mappings, None) and exceptions
    pass between the two, so a program sees neither tests nor expected values and cannot write a verdict. A test that
    passes anything else leaves the episode unscored; a program that returns anything else fails the test.

    Each test starts a new process without network, other processes or environment. It can read `/usr` and the folders
    of its Python, what is installed there included, and write to an empty folder; all else, and each socket, is out of
    reach. `info[files_field]`, a mapping of names to texts, lies read-only in `given/`. A program that exceeds
    `seconds` (the start of about 0.1 s included), `memory`, `disk` (MiB each; output included) or `processes` fails;
    once one has taken too long the other tests count as failed without running.

    `workers` programs are scored at the same time, by default as many as there are cores. `python` runs them, by
    default the one that runs relax-gym, or the system's where not everybody may read that one. Needs Linux with user
    namespaces; a run does not start where they are refused.
    """

    def __init__(
        self,
        *,
        field: str = "tests",
        files_field: str = "files",
        score: str = "fraction",
        seconds: float = 5.0,
        memory: int = 512,
        disk: int = 16,
        processes: int = 16,
        workers: int | None = None,
        python: str = "",
    ) -> None:
        choice_option("code", "score", score, ("fraction", "all"))
        workers = cores() if workers is None else workers
        numbers = {"seconds": seconds, "memory": memory, "disk": disk, "processes": processes, "workers": workers}
        for name, value in numbers.items():
            if not value > 0:
                raise RewardError(f"code: {name} is {value}; it must be above 0")
        self.field, self.files_field, self.score, self.workers = field, files_field, score, workers
        self.python, self._others = (python, []) if python else (sys.executable, [SYSTEM_PYTHON])
        self.limits = Limits(seconds=seconds, memory=memory, disk=disk, processes=processes)
        self._slots: weakref.WeakKeyDictionary[Any, asyncio.Semaphore] = weakref.WeakKeyDictionary()

    def preflight(self) -> None:
        """Run a program. Raises RewardError, saying what is missing, when there can be no sandbox here."""
        problems = []
        for python in (self.python, *self._others):
            program = run(python, ["-c", "print(6 * 7)"], files={}, limits=Limits(seconds=30.0))
            with ThreadPoolExecutor(1) as thread:  # the caller may have an event loop
                try:
                    done = thread.submit(asyncio.run, program).result()
                except RewardError as error:
                    problems.append(str(error))
                    continue
            if done.output == "42\n":
                self.python = python
                return
            problems.append(f"{python} cannot run there (exit status {done.status})")
        raise RewardError(f"code: {'; '.join(problems)}")

    async def __call__(self, trajectory: Trajectory, /) -> float:
        tests = reference(trajectory, self.field)
        if not isinstance(tests, list) or not tests or not all(map(_is_test, tests)):
            raise RewardError(
                f"code: info[{self.field!r}] is {tests!r:.100}; it must be a list of texts with assertions and of "
                "mappings with the texts input and output"
            )
        files = trajectory.info.get(self.files_field) or {}
        if not isinstance(files, Mapping) or not all(_is_file(*item) for item in files.items()):
            raise RewardError(
                f"code: info[{self.files_field!r}] is {files!r:.100}; it must be a mapping of names to texts; no name "
                "has a slash or is program.py"
            )
        text = answer_text(trajectory)
        blocks = BLOCK.findall(text)
        given = {**files, "program.py": blocks[-1] if blocks else text}
        slots = self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.workers))
        async with slots:
            passed = await self._passed(given, tests)
        return passed / len(tests) if self.score == "fraction" else float(passed == len(tests))

    async def _passed(self, given: Mapping[str, str], tests: list[Any]) -> int:
        """How many tests pass. After one that takes too long, or one that decides the score, the others do not run."""
        passed = 0
        for test in tests:
            verdict = await (self._asserts(given, test) if isinstance(test, str) else self._prints(given, test))
            if verdict is None or not (verdict or self.score == "fraction"):
                break
            passed += verdict
        return passed

    async def _prints(self, given: Mapping[str, str], test: Mapping[str, str]) -> bool | None:
        """Whether the test passes, None when it took too long."""
        arguments = ["/tmp/given/program.py"]
        done = await run(self.python, arguments, files=given, limits=self.limits, stdin=test["input"])
        if done.status is None:
            return None
        return done.status == 0 and _lines(done.output) == _lines(test["output"])

    async def _asserts(self, given: Mapping[str, str], test: str) -> bool | None:
        """Whether the test passes, None when it took too long."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            program = asyncio.ensure_future(
                run(
                    self.python,
                    ["-c", script("serve", theirs.fileno())],
                    files=given,
                    limits=self.limits,
                    channel=theirs.fileno(),
                )
            )
            program.add_done_callback(lambda _: _hang_up(theirs))
            try:
                verdict = await run(
                    self.python,
                    ["-c", script("judge", ours.fileno())],
                    files={"test.py": test},
                    limits=self.limits,
                    channel=ours.fileno(),
                )
            finally:
                program.cancel()
                await asyncio.wait({program})
        late = verdict.status is None
        if not program.cancelled():
            late |= program.result().status is None  # raises for a sandbox that cannot be made, no fault of the program
        if verdict.status == UNSUPPORTED:
            raise RewardError(f"code: a test passes or uses more than functions and plain values: {test!r:.200}")
        if verdict.status == 1:
            raise RewardError(f"code: a test is no Python: {test!r:.200}")
        if verdict.status != PASSED and late:
            return None
        return verdict.status == PASSED


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _is_test(test: Any) -> bool:
    if isinstance(test, Mapping):
        return all(isinstance(test.get(key), str) for key in ("input", "output"))
    return isinstance(test, str)


def _is_file(name: Any, text: Any) -> bool:
    return isinstance(name, str) and isinstance(text, str) and "/" not in name and name not in ("", "program.py")


def _hang_up(end: socket.socket) -> None:
    if end.fileno() >= 0:
        end.shutdown(socket.SHUT_RDWR)


def _lines(text: str) -> list[str]:
    """Without the white space at the ends of lines, and of the text, which no judge of programs looks at."""
    return [line.rstrip() for line in text.rstrip().split("\n")]
