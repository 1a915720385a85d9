"""The math reward checks in processes: right from every thread, and unharmed by endless checks and crafted answers."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from reward_kit import episode

from relax_gym.errors import RewardError
from relax_gym_rewards.math import Math


@pytest.fixture(scope="module")
def checker() -> Iterator[Math]:
    reward = Math(timeout=20.0, workers=1)
    yield reward
    reward.close()


@pytest.mark.parametrize(
    ("action", "answer", "expected"),
    [
        ("The answer is 42.", "42", 1.0),
        ("43", "42", 0.0),
        (r"so \boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"$\frac{1}{2}$", "1/2", 1.0),
        ("x^2+2x+1", "(x+1)^2", 1.0),
        ("x^2+2x+2", "(x+1)^2", 0.0),
        (r"$2\sqrt{2}$", r"\sqrt{8}", 1.0),
        (r"$\{2,1\}$", r"\{1,2\}", 1.0),
        ("(1, 2)", "(1,2)", 1.0),
        ("1,234", "1234", 1.0),
        ("50%", "0.5", 1.0),
        ("A", "A", 1.0),
        ("", "42", 0.0),
        ("no idea", "42", 0.0),
        ("6", 6, 1.0),
    ],
)
def test_math(checker: Math, action: str, answer: Any, expected: float) -> None:
    assert asyncio.run(checker(episode(action, answer=answer))) == expected


def test_math_says_when_the_reference_is_no_mathematics(checker: Math) -> None:
    with pytest.raises(RewardError, match=r"info\['answer'\] is 'foo bar\?', which is no mathematical expression"):
        asyncio.run(checker(episode("3", answer="foo bar?")))


def test_k71_math_scores_one_from_main_thread_worker_thread_and_running_loop(checker: Math) -> None:
    right = episode("1/2", answer=r"\frac{1}{2}")
    scores = [asyncio.run(checker(right))]
    thread = threading.Thread(target=lambda: scores.append(asyncio.run(checker(right))))
    thread.start()
    thread.join()

    async def many() -> list[float]:
        return list(await asyncio.gather(*(checker(right) for _ in range(3))))

    assert scores + asyncio.run(many()) == [1.0] * 5


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def wait_until_gone(pids: list[int], seconds: float = 10.0) -> list[int]:
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def test_k72_an_endless_check_scores_zero_is_counted_and_leaves_no_process(checker: Math) -> None:
    checker.close()  # the processes are shared, and end with the last that uses them
    reward = Math(timeout=5, workers=1)

    async def both() -> tuple[float, float]:
        hung = await reward(episode("$9^{9^{9^9}}$", answer="$x+1$"))
        return hung, await reward(episode("x+1", answer="$x+1$"))

    before = {child.pid for child in multiprocessing.active_children()}
    assert asyncio.run(both()) == (0.0, 1.0)
    assert reward.metrics() == {"timeouts": 1.0, "crashes": 0.0}
    assert reward.metrics() == {"timeouts": 0.0, "crashes": 0.0}
    reward.close()
    assert {child.pid for child in multiprocessing.active_children()} == before


def test_k72_a_cancelled_check_ends_its_process_and_a_killed_run_leaves_no_orphans(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(
        textwrap.dedent(
            """
            import asyncio, multiprocessing, os, signal, sys
            sys.path[:0] = PATHS
            from reward_kit import episode
            from relax_gym_rewards.math import Math

            async def main():
                reward = Math(timeout=60.0, workers=1)
                check = asyncio.create_task(reward(episode("$9^{9^{9^9}}$", answer="$x+1$")))
                await asyncio.sleep(1.5)
                first = [child.pid for child in multiprocessing.active_children()]
                if sys.argv[1] == "cancel":
                    check.cancel()
                    await asyncio.wait([check])
                    print(check.cancelled(), *first, flush=True)
                    while set(first) & {child.pid for child in multiprocessing.active_children()}:
                        await asyncio.sleep(0.05)
                    print(await reward(episode("1", answer="1.0")), flush=True)
                else:
                    print(*first, flush=True)
                    os.kill(os.getpid(), signal.SIGKILL)

            if __name__ == "__main__":
                asyncio.run(main())
            """
        ).replace("PATHS", repr(sys.path))
    )
    done = subprocess.run([sys.executable, str(script), "cancel"], capture_output=True, text=True, timeout=60)
    cancelled, *pids = done.stdout.split()
    assert (cancelled, pids[1:], done.returncode) == ("True", ["1.0"], 0), done.stderr
    assert wait_until_gone([int(pids[0])]) == []
    killed = subprocess.run([sys.executable, str(script), "kill"], stdout=subprocess.PIPE, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    orphans = [int(pid) for pid in killed.stdout.split()]
    assert len(orphans) == 1 and wait_until_gone(orphans) == []


def test_k73_cancelling_a_check_propagates_and_is_not_a_wrong_answer(checker: Math) -> None:
    async def cancelled() -> bool:
        task = asyncio.create_task(checker(episode("1", answer="2.0")))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert asyncio.run(cancelled()) is True


@pytest.mark.parametrize(
    "payload",
    [
        "__import__('os').system('touch {file}')",
        "$__import__('os').system('touch {file}')$",
        r"\boxed{{__import__('pathlib').Path('{file}').touch()}}",
        "exec(\"open('{file}', 'w')\")",
        r"$\input{{{file}}}$",
    ],
)
def test_k81_a_crafted_answer_has_no_side_effect(checker: Math, tmp_path: Path, payload: str) -> None:
    file = tmp_path / "pwned"
    assert asyncio.run(checker(episode(payload.format(file=file), answer="42"))) == 0.0
    assert not file.exists()
