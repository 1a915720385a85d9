"""A crowd of tasks goes on a few at a time. Counted in passes of the event loop; nothing reads the clock."""

import asyncio
from collections import Counter

from relax_gym.rollout import Turnstile


def passes(tasks: int, per_pass: int) -> tuple[Counter[int], list[int]]:
    """How many tasks went on in each pass of the loop, and in which order."""

    async def main() -> tuple[Counter[int], list[int]]:
        turnstile = Turnstile(per_pass)
        now = 0
        seen: Counter[int] = Counter()
        order: list[int] = []

        async def clock() -> None:
            nonlocal now
            while True:
                await asyncio.sleep(0)
                now += 1

        async def one(index: int) -> None:
            await turnstile.enter()
            seen[now] += 1
            order.append(index)

        ticking = asyncio.create_task(clock())
        await asyncio.gather(*(one(index) for index in range(tasks)))
        ticking.cancel()
        return seen, order

    return asyncio.run(main())


def test_a_crowd_goes_on_a_few_at_a_time_in_order() -> None:
    seen, order = passes(tasks=20, per_pass=8)
    assert sorted(seen.values()) == [4, 8, 8]
    assert order == list(range(20))


def test_few_tasks_go_on_together() -> None:
    seen, order = passes(tasks=3, per_pass=8)
    assert list(seen.values()) == [3]
    assert order == [0, 1, 2]


def test_a_cancelled_task_gives_its_place_back() -> None:
    async def main() -> None:
        turnstile = Turnstile(1)
        waiting = [asyncio.create_task(turnstile.enter()) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        waiting[1].cancel()
        done, _ = await asyncio.wait(waiting, timeout=5)
        assert waiting[2] in done
        assert not waiting[2].cancelled()

    asyncio.run(main())
