"""Rewards in processes that can be killed: what they may take, who may call them, and what is left afterwards."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from reward_kit import episode

from relax_gym import isolation
from relax_gym.errors import RewardError
from relax_gym.isolation import Isolated, IsolatedGroupReward, IsolatedReward, Killed, isolated
from relax_gym.scoring import WeightedReward, close_rewards, make_reward, score, score_group
from relax_gym.types import Trajectory
from relax_gym_rewards.math import Math

LONG = 60.0  # what a call may take that does end: the first one imports this file


def pid(trajectory: Trajectory) -> float:
    return float(os.getpid())


def catastrophe(trajectory: Trajectory) -> float:
    return float(re.match(r"(a+)+$", "a" * 60 + "b") is None)


def power(trajectory: Trajectory) -> float:
    return float(len(str(10**10**10)))


def bomb(trajectory: Trajectory) -> float:
    return float(len(bytearray(1 << 33)))


def deep(trajectory: Trajectory) -> float:
    return deep(trajectory)


def exits(trajectory: Trajectory) -> float:
    os._exit(3)


def refuses(trajectory: Trajectory) -> float:
    raise ValueError("no")


class Does:
    """What it is told, in a process of its own."""

    isolated = True

    def __init__(self, what: Any, seconds: float = LONG) -> None:
        self.what, self.seconds = what, seconds

    async def __call__(self, trajectory: Trajectory) -> float:
        return float(self.what(trajectory))


class Sizes:
    isolated = True
    seconds = LONG

    def score_group(self, trajectories: Sequence[Trajectory]) -> list[float]:
        return [float(os.getpid() != 0) * len(trajectories) for _ in trajectories]


def scored(reward: Any, limit: float = 2 * LONG) -> Trajectory:
    term = WeightedReward(name="r", weight=1.0, reward=isolated(reward))
    try:
        return asyncio.run(score(episode("a", answer="1"), [term], timeout=limit))
    finally:
        term.reward.close()  # type: ignore[union-attr]


@pytest.fixture(scope="module", autouse=True)
def pool() -> Iterator[Isolated]:
    """Keeps the processes between tests."""
    share = Isolated(workers=1)
    asyncio.run(share.call(os.getpid, seconds=LONG))
    yield share
    share.close()
    assert multiprocessing.active_children() == []


def test_k71_it_runs_elsewhere_called_from_main_thread_worker_thread_and_a_running_loop(pool: Isolated) -> None:
    found = [scored(Does(pid)).reward]
    thread = threading.Thread(target=lambda: found.append(scored(Does(pid)).reward))
    thread.start()
    thread.join()

    async def many() -> list[Any]:
        return await asyncio.gather(*(pool.call(os.getpid, seconds=LONG) for _ in range(3)))

    found += asyncio.run(many())
    assert None not in found and os.getpid() not in found


@pytest.mark.parametrize(
    ("what", "seconds", "reason"),
    [
        (catastrophe, 1.0, "took longer than 1 s in its process"),
        (power, 1.0, "(took longer than 1 s in its process|needed more than)"),
        (bomb, LONG, "needed more than 1024 MiB"),
        (deep, LONG, "recursed too deep"),
        (exits, LONG, r"crashed its process \(exit code 3\)"),
        (refuses, LONG, "ValueError: no"),
    ],
)
def test_k72_what_hangs_grows_or_crashes_is_unscored_with_a_reason(what: Any, seconds: float, reason: str) -> None:
    found = scored(Does(what, seconds))
    assert found.reward is None
    assert re.search(reason, found.reward_failures["r"]), found.reward_failures["r"]


def test_k73_cancelling_ends_the_process_and_propagates(pool: Isolated) -> None:
    async def cancelled() -> bool:
        hangs = isolated(Does(catastrophe))
        call = asyncio.create_task(hangs(episode("a")))
        await asyncio.wait([call], timeout=1.0)
        call.cancel()
        await asyncio.wait([call])
        hangs.close()
        await pool.call(os.getpid, seconds=LONG)  # there is one process, so it is free again
        return call.cancelled()

    assert asyncio.run(cancelled()) is True


def test_groups_are_scored_there_too() -> None:
    term = WeightedReward(name="r", weight=1.0, reward=isolated(Sizes()))

    async def both() -> list[Trajectory]:
        one = [await score(episode("a"), [term], timeout=LONG) for _ in range(2)]
        return await score_group(one, [term], timeout=LONG)

    assert [one.reward for one in asyncio.run(both())] == [2.0, 2.0]
    asyncio.run(close_rewards([term], timeout=LONG))


def test_what_cannot_travel_is_refused_at_once() -> None:
    with pytest.raises(RewardError, match="define its class at the top of a module"):
        isolated(Does(lambda trajectory: 1.0))


def test_a_run_isolates_the_rewards_that_ask_for_it() -> None:
    assert isinstance(make_reward(Does, {"what": pid}), IsolatedReward)
    assert isinstance(make_reward(Sizes, {}), IsolatedGroupReward)


def test_a_reward_that_does_not_ask_for_it_stays_as_it_is() -> None:
    assert isolated(pid) is pid


@pytest.mark.parametrize(
    "answer",
    [
        "$10^{10^{10}}$",
        pytest.param(r"\frac{1}{" * 3000 + "1" + "}" * 3000, marks=pytest.mark.slow),
        pytest.param("(" * 20_000, marks=pytest.mark.slow),
        pytest.param("9" * 100_000, marks=pytest.mark.slow),
    ],
    ids=["power", "fractions", "parentheses", "digits"],
)
def test_k72_hostile_mathematics_ends_within_its_limit(answer: str) -> None:
    reward = Math(timeout=1.0, workers=1)
    assert asyncio.run(reward(episode(answer, answer="x+1"))) == 0.0
    reward.close()


def test_the_processes_end_with_the_last_reward_that_used_them(pool: Isolated) -> None:
    terms = [WeightedReward(name=name, weight=1.0, reward=isolated(Does(pid))) for name in "ab"]

    async def both() -> list[bool]:
        await score(episode("a"), terms, timeout=2 * LONG)
        pool.close()
        left = []
        for term in terms:
            left.append(bool(multiprocessing.active_children()))
            await close_rewards([term], timeout=LONG)
        return [*left, bool(multiprocessing.active_children())]

    assert asyncio.run(both()) == [True, True, False]


def test_killed_says_whether_time_ran_out(pool: Isolated) -> None:
    with pytest.raises(Killed) as caught:
        asyncio.run(pool.call(os._exit, 1, seconds=LONG))
    assert not caught.value.timed_out
    with pytest.raises(Killed) as caught:
        asyncio.run(pool.call(time.sleep, LONG, seconds=0.1))
    assert caught.value.timed_out


def prepare() -> None:
    os.environ["PREPARED"] = str(os.getpid())


def test_processes_are_prepared_before_their_first_call(pool: Isolated) -> None:
    pool.close()
    share = Isolated(prepare=prepare)
    assert asyncio.run(share.call(os.getenv, "PREPARED", seconds=LONG)) not in (None, str(os.getpid()))
    share.close()


def test_a_share_that_is_garbage_waits_for_no_lock_and_ends_the_processes_if_it_was_the_last(pool: Isolated) -> None:
    pool.close()
    share = Isolated()
    asyncio.run(share.call(os.getpid, seconds=LONG))
    lock = isolation._SHARED._lock
    held, seen = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            seen.wait(LONG)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(LONG)
    del share
    gc.collect()
    assert holder.is_alive()
    assert multiprocessing.active_children()
    seen.set()
    holder.join()
    deadline = time.monotonic() + LONG
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert multiprocessing.active_children() == []
