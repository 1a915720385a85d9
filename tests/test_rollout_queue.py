"""The queue's promises, on its real code with every interleaving of a small model."""

import asyncio
import itertools

import pytest

from relax_gym.errors import StalenessError
from relax_gym.rollout_queue import Account, RolloutQueue
from relax_gym.types import Completion, FinishReason, Group, StopReason, Task, Trajectory, Turn


def group(slot: int, version: int) -> Group:
    said = Completion(token_ids=(1,), logprobs=(0.0,), versions=(version,), finish_reason=FinishReason.STOP)
    turn = Turn(observation=(), context_ids=(0,), completion=said, text="", action="")
    one = Trajectory(
        task=Task(env_id="a/B-v0", seed=slot), episode_id=str(slot), turns=(turn,), stop_reason=StopReason.ENV_DONE
    )
    return Group(group_id=str(slot), slot=slot, trajectories=(one,))


async def settle() -> None:
    """Let everything that can run, run."""
    for _ in range(5):
        await asyncio.sleep(0)


async def admitted(queue: RolloutQueue) -> list[int]:
    """All slots that may start right now."""
    slots = []
    while True:
        task = asyncio.ensure_future(queue.admit())
        await settle()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return slots
        if task.result() is None:
            return slots
        slots.append(task.result())


@pytest.mark.parametrize(("staleness", "expected"), [(0, [0, 1]), (1, [0, 1, 2, 3]), (9, [0, 1, 2, 3, 4, 5])])
def test_admission_is_bounded_by_the_version_and_the_last_step(staleness: int, expected: list[int]) -> None:
    async def main() -> list[int]:
        queue = RolloutQueue(groups_per_step=2, max_staleness=staleness, first_step=0, last_step=3)
        return await admitted(queue)

    assert asyncio.run(main()) == expected


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("per_step", [1, 2])
@pytest.mark.parametrize("first_step", [0, 2])
def test_k101_no_order_of_finishing_deadlocks_or_breaks_the_bound(
    staleness: int, per_step: int, first_step: int
) -> None:
    last_step = first_step + 3

    async def play(order: tuple[int, ...]) -> tuple[int, int]:
        queue = RolloutQueue(
            groups_per_step=per_step, max_staleness=staleness, first_step=first_step, last_step=last_step
        )
        running: dict[int, int] = {}
        choices = itertools.cycle(order)
        version, worst = first_step, 0
        while version < last_step:
            running |= dict.fromkeys(await admitted(queue), version)
            batch = asyncio.ensure_future(queue.get(version))
            await settle()
            while not batch.done():
                assert running, "nothing is running and the learner waits: deadlock"
                slot = sorted(running)[next(choices) % len(running)]
                await queue.put(slot, group(slot, running.pop(slot)))
                await settle()
            for got in batch.result():
                worst = max(worst, version - got.trajectories[0].turns[0].completion.versions[0])
            version += 1
            await queue.advance(version)
        assert await queue.admit() is None
        queue.check()
        assert queue.account() == Account(admitted=3 * per_step, consumed=3 * per_step)
        return worst, queue.account().consumed

    lags = [asyncio.run(play(order))[0] for order in itertools.product(range(3), repeat=4)]
    assert max(lags) <= staleness
    if staleness == 0:
        assert set(lags) == {0}


def test_k99_dropped_slots_are_counted_and_their_step_goes_on() -> None:
    async def main() -> tuple[list[int], dict[str, int]]:
        queue = RolloutQueue(groups_per_step=2, max_staleness=0, first_step=0, last_step=1)
        await admitted(queue)
        await queue.drop(0, "zero_variance")
        await queue.put(1, group(1, 0))
        got = [g.slot for g in await queue.get(0)]
        queue.check()
        return got, dict(queue.account().dropped)

    assert asyncio.run(main()) == ([1], {"zero_variance": 1})


def test_k100_a_stale_token_is_refused_at_the_learner() -> None:
    async def main() -> list[int]:
        queue = RolloutQueue(groups_per_step=1, max_staleness=1, first_step=5, last_step=9)
        await queue.admit()
        await queue.put(5, group(5, 3))
        with pytest.raises(StalenessError, match="version 3, 2 behind version 5; max_staleness is 1"):
            await queue.get(5)
        return [waiting.slot for waiting in queue.waiting()]

    assert asyncio.run(main()) == [5]  # and stays, so that the end of the run keeps it


@pytest.mark.parametrize(("staleness", "expected"), [(0, [14, 15]), (1, [14, 15, 16, 17])])
def test_k102_a_run_that_goes_on_admits_no_more_than_one_that_begins(staleness: int, expected: list[int]) -> None:
    async def main() -> list[int]:
        queue = RolloutQueue(groups_per_step=2, max_staleness=staleness, first_step=7, last_step=20)
        return await admitted(queue)

    assert asyncio.run(main()) == expected


def test_a_group_handed_in_is_there_even_if_the_one_who_does_is_cancelled() -> None:
    async def main() -> list[int]:
        queue = RolloutQueue(groups_per_step=1, max_staleness=1, first_step=0, last_step=1)
        await queue.admit()
        async with queue._changed:
            put = asyncio.create_task(queue.put(0, group(0, 0)))
            await settle()
            put.cancel()
            await asyncio.gather(put, return_exceptions=True)
        return [waiting.slot for waiting in queue.waiting()]

    assert asyncio.run(main()) == [0]


def test_a_slot_handed_in_twice_is_a_bug() -> None:
    async def main() -> None:
        queue = RolloutQueue(groups_per_step=2, max_staleness=0, first_step=0, last_step=1)
        await queue.admit()
        await queue.put(0, group(0, 0))
        await queue.put(0, group(0, 0))

    with pytest.raises(ValueError, match="slot 0 was handed in twice"):
        asyncio.run(main())


def test_a_run_that_goes_on_with_less_staleness_than_it_had_gives_out_what_the_bound_allows() -> None:
    async def main() -> tuple[list[int], list[int], list[int]]:
        queue = RolloutQueue(
            groups_per_step=2, max_staleness=0, first_step=2, last_step=9, order="ready", unfinished=[1, 5, 6, 7, 9]
        )
        first = await admitted(queue)
        for slot in first:
            await queue.put(slot, group(slot, 2))
        got = [one.slot for one in await queue.get(2)]
        await queue.advance(3)
        return first, got, await admitted(queue)

    assert asyncio.run(main()) == ([1, 5], [1, 5], [6, 7])


def test_what_overtook_in_a_run_that_goes_on_is_neither_lost_nor_trained_on_again() -> None:
    async def play(queue: RolloutQueue, steps: range, skip: int) -> list[int]:
        trained = []
        for step in steps:
            for slot in await admitted(queue):
                if slot != skip:
                    await queue.put(slot, group(slot, step))
            trained += [one.slot for one in await queue.get(step)]
            await queue.advance(step + 1)
        return trained

    async def main() -> list[int]:
        sizes = {"groups_per_step": 2, "max_staleness": 3, "last_step": 5, "order": "ready"}
        before = RolloutQueue(first_step=0, **sizes)
        await before.limit(4)
        trained = await play(before, range(2), skip=1)
        after = RolloutQueue(first_step=2, unfinished=before.unfinished, **sizes)
        return trained + await play(after, range(2, 5), skip=-1)

    trained = asyncio.run(main())
    assert trained[:4] == [0, 2, 3, 4]
    assert sorted(trained) == list(range(10))


def test_the_newest_unfinished_group_gives_way_first() -> None:
    late: list[tuple[int, bool, bool]] = []

    async def main() -> list[int]:
        queue = RolloutQueue(
            groups_per_step=1,
            max_staleness=0,
            first_step=0,
            last_step=2,
            order="ready",
            oversample=2,
            on_late=lambda slot, one, empty: late.append((slot, one is not None, empty)),
        )
        await admitted(queue)
        await queue.put(2, group(2, 0))
        await queue.put(1, group(1, 0))
        got = [one.slot for one in await queue.get(0)]
        queue.check()
        assert queue.account().dropped == {"late": 2}
        await queue.advance(1)
        assert await admitted(queue) == [0, 1, 3]
        return got

    assert asyncio.run(main()) == [2]
    assert late == [(0, False, False), (1, True, False)]


def test_only_groups_that_no_other_can_overtake_are_given_ahead() -> None:
    async def main() -> list[list[int]]:
        queue = RolloutQueue(groups_per_step=2, max_staleness=1, first_step=0, last_step=9, order="ready")
        for slot in await admitted(queue):
            if slot < 2:
                await queue.put(slot, group(slot, 0))
        await queue.get(0)
        await queue.advance(1)
        assert await admitted(queue) == [4, 5]
        asking, given, seen = asyncio.ensure_future(queue.next_finished(set())), [], set[int]()
        for slot in (4, 5, 3, 2):  # 2 and 3 are due now, and there is no room for others
            await queue.put(slot, group(slot, 1))
            await settle()
            if not asking.done():
                given.append([])
                continue
            given.append([one.slot for one in asking.result()])
            seen.update(given[-1])
            asking = asyncio.ensure_future(queue.next_finished(seen))
        assert sorted(one.slot for one in await queue.get(1)) == [2, 3]
        return given

    assert asyncio.run(main()) == [[], [], [3], []]


def test_accounts_that_do_not_add_up_are_a_bug() -> None:
    queue = RolloutQueue(groups_per_step=1, max_staleness=0, first_step=0, last_step=1)
    queue._accounts[0].admitted += 1
    with pytest.raises(RuntimeError, match="lost or counted twice"):
        queue.check()


def test_another_step_than_the_next_is_a_bug() -> None:
    queue = RolloutQueue(groups_per_step=1, max_staleness=0, first_step=3, last_step=5)
    with pytest.raises(ValueError, match="step 4 was asked for, but step 3 is the next"):
        asyncio.run(queue.get(4))
