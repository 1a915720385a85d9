"""A loop that is run to its end ends, whatever hangs in it, and so does its process."""

import asyncio
import subprocess
import sys
import threading
from typing import Any

import pytest

from relax_gym.running import MOST_THREADS, run


def test_threads_of_the_loop_give_what_python_s_own_do() -> None:
    async def main() -> list[Any]:
        numbers = await asyncio.gather(*(asyncio.to_thread(lambda i=i: i) for i in range(3 * MOST_THREADS)))
        with pytest.raises(ValueError, match="no"):
            await asyncio.to_thread(int, "no")
        names = {await asyncio.to_thread(lambda: threading.current_thread().name) for _ in range(20)}
        assert len(names) <= MOST_THREADS
        return numbers

    assert run(main()) == list(range(3 * MOST_THREADS))


def test_calls_that_are_cancelled_before_a_thread_has_them_are_never_made() -> None:
    release, made = threading.Event(), []

    async def main() -> None:
        busy = [asyncio.create_task(asyncio.to_thread(release.wait, 20)) for _ in range(MOST_THREADS)]
        late = asyncio.create_task(asyncio.to_thread(made.append, 1))
        await asyncio.sleep(0.05)
        late.cancel()
        await asyncio.wait({late})
        release.set()
        await asyncio.gather(*busy)
        await asyncio.to_thread(made.append, 2)

    run(main())
    assert made == [2]


def test_what_is_being_done_in_a_thread_is_finished_when_the_loop_is_closed() -> None:
    begun, done = threading.Event(), []

    def write() -> None:
        begun.set()
        threading.Event().wait(0.1)
        done.append(True)

    async def main() -> None:
        writing = asyncio.create_task(asyncio.to_thread(write))
        await asyncio.to_thread(begun.wait, 20)
        writing.cancel()

    run(main())
    assert done == [True]


CHILD = """
import asyncio, threading
from relax_gym import running, workers
workers.LEAVING = 0.1

async def stubborn():
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass

async def main():
    kept.append(asyncio.create_task(stubborn()))
    kept.append(asyncio.create_task(asyncio.to_thread(threading.Event().wait)))
    await asyncio.sleep(0.1)
    return "the end"

kept = []
print(running.run(main()), flush=True)
"""


def test_k110_a_process_ends_whatever_hangs_in_its_tasks_and_threads() -> None:
    ended = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "the end\n"
    assert "stubborn" in ended.stderr
    assert "it is left behind" in ended.stderr
    assert "Event.wait" in ended.stderr


INTERRUPTED = """
import asyncio, os, signal, threading
from relax_gym import running, workers

async def stubborn():
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            again()

def again():  # what a second Ctrl-C sends, and a task that is begun while tasks are ended
    kept.append(asyncio.create_task(asyncio.Event().wait()))
    os.kill(os.getpid(), signal.SIGINT)

async def main():
    kept.append(asyncio.create_task(stubborn()))
    await asyncio.sleep(0.1)
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.sleep(60)

kept = []
try:
    running.run(main())
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_a_second_interrupt_ends_what_the_first_has_not() -> None:
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "interrupted\n"
