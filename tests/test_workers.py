import asyncio
import threading
from typing import Any

import pytest

from relax_gym.workers import LimitedThread, OwnTask, Streamed, Worker, WorkerThreads, WorkerTimeout


def test_calls_run_off_the_loop_and_reuse_threads() -> None:
    async def main() -> tuple[set[int], int]:
        threads = WorkerThreads("t")
        seen = {await threads.call(threading.get_ident) for _ in range(5)}
        threads.close()
        return seen, threading.get_ident()

    seen, loop_thread = asyncio.run(main())
    assert len(seen) == 1
    assert loop_thread not in seen


def test_a_hung_call_times_out_and_its_thread_is_replaced() -> None:
    release = threading.Event()

    async def main() -> tuple[int, int]:
        threads = WorkerThreads("t", limit=1)
        first = await threads.call(threading.get_ident)
        with pytest.raises(WorkerTimeout, match=r"took longer than 0.05 seconds"):
            await threads.call(lambda: release.wait(20), timeout=0.05)
        second = await threads.call(threading.get_ident)
        release.set()
        return first, second

    first, second = asyncio.run(main())
    assert first != second


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (ValueError("x"), ValueError),
        (TimeoutError("own"), TimeoutError),
        (SystemExit(3), RuntimeError),
        (StopIteration(), RuntimeError),
    ],
)
def test_what_the_function_raises_arrives_and_the_thread_lives_on(
    raised: BaseException, expected: type[Exception]
) -> None:
    def fail() -> None:
        raise raised

    async def main() -> int:
        threads = WorkerThreads("t", limit=1)
        with pytest.raises(expected) as caught:
            await threads.call(fail, timeout=5)
        assert not isinstance(caught.value, WorkerTimeout)
        return await threads.call(lambda: 7)

    assert asyncio.run(main()) == 7


def test_waiting_for_a_thread_is_not_run_time() -> None:
    async def main() -> list[int]:
        threads = WorkerThreads("t", limit=1)
        pause = threading.Event()
        return await asyncio.gather(*(threads.call(lambda i=i: pause.wait(0.3) or i, timeout=2) for i in range(8)))

    assert asyncio.run(main()) == list(range(8))


def test_a_limited_thread_outlives_functions_and_coroutines_that_hang() -> None:
    release = threading.Event()

    async def waits() -> None:
        await asyncio.Event().wait()

    async def blocks() -> None:
        release.wait(20)

    async def here() -> int:
        return threading.get_ident()

    with LimitedThread("t", 0.05) as thread:
        first = thread.call(here)
        assert thread.call(threading.get_ident) == first
        with pytest.raises(TimeoutError, match=r"waits took longer than 0.05 s"):
            thread.call(waits)
        assert thread.call(here) == first  # it was cancelled, so the thread is free
        for hang in (blocks, release.wait):
            with pytest.raises(TimeoutError, match=rf"{hang.__name__} took longer than 0.05 s"):
                thread.call(hang)
            assert thread.call(here) != first
        release.set()


def test_a_thread_that_comes_back_during_a_later_call_changes_nothing() -> None:
    first, second = threading.Event(), threading.Event()

    def hang_while_the_first_comes_back() -> None:
        first.set()
        second.wait(20)

    with LimitedThread("t", 0.05) as thread:
        with pytest.raises(TimeoutError, match=r"wait took longer than 0.05 s"):
            thread.call(first.wait, 20)
        with pytest.raises(TimeoutError, match=r"hang_while_the_first_comes_back took longer"):
            thread.call(hang_while_the_first_comes_back)
        assert thread.call(lambda: 7) == 7
        second.set()


def test_what_a_call_raises_after_its_caller_has_left_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()

    def save() -> None:
        release.wait(20)
        raise OSError("disk is full")

    async def main() -> None:
        worker = Worker("learner")
        saving = asyncio.create_task(worker.call(save))
        await asyncio.sleep(0)
        saving.cancel()
        await asyncio.gather(saving, return_exceptions=True)
        release.set()
        assert await worker.call(lambda: 7) == 7  # the thread lives on
        worker.stop()

    asyncio.run(main())
    (record,) = caplog.records
    assert record.getMessage() == "a call failed in its thread after its caller had stopped waiting for it"
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "disk is full"


def test_what_a_call_raises_after_the_loop_is_closed_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    release, logged = threading.Event(), threading.Event()

    def fail() -> None:
        release.wait(20)
        raise OSError("disk is full")

    async def main() -> Worker:
        worker = Worker("t")
        with pytest.raises(WorkerTimeout):
            await worker.call(fail, timeout=0.01)
        return worker

    worker = asyncio.run(main())
    release.set()
    worker.post(lambda: logged.set())
    assert logged.wait(20)
    assert "OSError: disk is full" in caplog.text


def test_streamed_items_are_computed_one_by_one_in_the_thread_of_a_worker():
    seen: list[object] = []

    def items():
        for number in range(3):
            seen.append((number, threading.current_thread().name))
            yield number
        seen.append("end")

    worker = Worker("there")
    streamed = Streamed(worker, items)
    assert (next(streamed), seen) == (0, [(0, "there")])
    assert (list(streamed), seen[-1]) == ([1, 2], "end")
    streamed.close()
    worker.stop()


def test_k109_nobody_waits_for_items_that_are_closed():
    left = threading.Event()

    def items():
        try:
            yield 1
        finally:
            left.set()

    worker = Worker("there")
    streamed = Streamed(worker, items)
    assert next(streamed) == 1
    streamed.close()
    streamed.close()
    worker.stop()
    assert left.wait(10)
    with pytest.raises(RuntimeError, match="the items are closed"):
        next(streamed)


def test_what_computing_an_item_raises_is_raised_where_it_was_asked_for():
    def items():
        yield 1
        raise SystemExit("enough")

    worker = Worker("there")
    streamed = Streamed(worker, items)
    assert next(streamed) == 1
    with pytest.raises(SystemExit, match="enough"):
        next(streamed)
    streamed.close()
    worker.stop()


# One task -------------------------------------------------------------------------------------------------------------


async def current() -> asyncio.Task[Any] | None:
    return asyncio.current_task()


async def fails(error: BaseException) -> None:
    raise error


async def stays(seen: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        seen.append("ended")


async def ignores(cancelled: asyncio.Event, end: asyncio.Event) -> str:
    while not end.is_set():
        try:
            await end.wait()
        except asyncio.CancelledError:
            cancelled.set()
    return "ended"


def test_all_calls_are_made_in_one_task_which_outlives_errors_and_limits() -> None:
    """What is entered in one call can be left in another, as scopes of anyio are."""

    async def main() -> None:
        own, seen = OwnTask(), []
        first = await own.call(current())
        assert first is not asyncio.current_task()
        for error in (ValueError("x"), SystemExit(3), asyncio.CancelledError()):
            with pytest.raises(type(error)) as caught:
                await own.call(fails(error))
            assert caught.value is error
        with pytest.raises(WorkerTimeout, match=r"took longer than 0.05 seconds"):
            await own.call(stays(seen), timeout=0.05)
        calling = asyncio.create_task(own.call(stays(seen)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        assert seen == ["ended", "ended"]
        assert await own.call(current()) is first
        own.stop()
        await asyncio.wait_for(asyncio.wait({first}), 20)

    asyncio.run(main())


def test_a_call_that_is_cancelled_before_it_begins_is_never_made() -> None:
    async def main() -> None:
        own, seen, end = OwnTask(), [], asyncio.Event()
        first = asyncio.create_task(own.call(end.wait()))
        second = asyncio.create_task(own.call(stays(seen)))
        await asyncio.sleep(0.01)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        end.set()
        assert await first
        assert await own.call(asyncio.sleep(0, "next"), timeout=20) == "next"
        assert seen == []

    asyncio.run(main())


def test_what_ignores_its_cancellation_is_left_even_by_the_loop(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("relax_gym.workers.LEAVING", 0.05)

    async def main() -> None:
        own, cancelled = OwnTask(), asyncio.Event()
        with pytest.raises(WorkerTimeout):
            await own.call(ignores(cancelled, asyncio.Event()), timeout=0.05)
        assert cancelled.is_set()
        calling = asyncio.create_task(own.call(ignores(asyncio.Event(), asyncio.Event())))
        await asyncio.sleep(0.01)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        assert await own.call(asyncio.sleep(0, "next")) == "next"

    asyncio.run(main())
    assert caplog.text.count("it is left behind") == 2


def test_what_was_left_and_ends_after_all_takes_no_later_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax_gym.workers.LEAVING", 0.01)

    async def main() -> None:
        own, end = OwnTask(), asyncio.Event()
        first = await own.call(current())
        with pytest.raises(WorkerTimeout):
            await own.call(ignores(asyncio.Event(), end), timeout=0.01)
        end.set()
        assert first is not None
        await asyncio.wait_for(asyncio.wait({first}), 20)
        assert await own.call(current()) is not first

    asyncio.run(main())
