"""What signals ask of a run, and what that may leave undone."""

import asyncio
import os
import signal

import pytest

from relax_gym.stopping import LeftUndone, Stopping


def test_k109_whatever_is_cancelled_but_the_run_is_not_swallowed() -> None:
    async def main() -> None:
        stopping = Stopping()
        waiting = asyncio.ensure_future(stopping.unless_asked(asyncio.Event().wait()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

        stopping.ask()
        with pytest.raises(LeftUndone):
            await stopping.unless_asked(asyncio.Event().wait())

        async def done() -> int:
            return 1

        task = asyncio.ensure_future(done())
        await task
        assert await stopping.unless_asked(task) == 1

    asyncio.run(main())


@pytest.mark.parametrize(("launched", "ends"), [("1", True), ("2", False)])
def test_a_launcher_may_ask_a_run_to_end_that_is_saying_why_it_does(
    launched: str, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(stopping: Stopping, *, asked: bool = False) -> None:
        with stopping.listening():
            if asked:
                os.kill(os.getpid(), signal.SIGTERM)
                with pytest.raises(LeftUndone):
                    await stopping.unless_asked(asyncio.sleep(10))

    monkeypatch.setenv("WORLD_SIZE", launched)
    heard: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        asyncio.run(main(Stopping()))
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM] * ends
        asyncio.run(asyncio.wait_for(main(Stopping(), asked=True), 10))  # a run that follows hears it again
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
