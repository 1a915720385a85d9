"""Rewards that score many episodes at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from reward_kit import episode

from relax_gym.errors import RewardError
from relax_gym.scoring import WeightedReward, close_rewards, make_reward, score
from relax_gym.types import Trajectory


class Lengths:
    """Notes how many came at once."""

    batch_size = 3
    batch_wait = 0.0

    def __init__(self, value: Any = None) -> None:
        self.sizes: list[int] = []
        self.value, self.closed = value, 0

    def batch(self, trajectories: Sequence[Trajectory]) -> Any:
        self.sizes.append(len(trajectories))
        if isinstance(self.value, Exception):
            raise self.value
        return [len(one.turns[-1].action) for one in trajectories] if self.value is None else self.value

    def metrics(self) -> dict[str, float]:
        return {"batches": len(self.sizes)}

    def close(self) -> None:
        self.closed += 1


class Async(Lengths):
    async def batch(self, trajectories: Sequence[Trajectory]) -> Any:
        return super().batch(trajectories)


def scored(reward: Lengths, *actions: str) -> list[Trajectory]:
    terms = [WeightedReward(name="r", weight=2.0, reward=make_reward(lambda: reward, {}))]

    async def all_at_once() -> list[Trajectory]:
        found = await asyncio.gather(*(score(episode(action), terms, timeout=30) for action in actions))
        assert terms[0].reward.metrics() == {"batches": len(reward.sizes)}  # type: ignore[union-attr]
        await close_rewards(terms, timeout=30)
        return found

    return asyncio.run(all_at_once())


@pytest.mark.parametrize("kind", [Lengths, Async])
def test_full_batches_go_at_once_and_the_rest_after_a_wait(kind: type[Lengths]) -> None:
    reward = kind()
    found = scored(reward, *("a" * size for size in range(1, 9)))
    assert [one.reward for one in found] == [2.0 * size for size in range(1, 9)]
    assert (sorted(reward.sizes), reward.closed) == ([2, 3, 3], 1)


def test_a_full_batch_does_not_wait() -> None:
    reward = Lengths()
    reward.batch_wait = 3600.0
    assert [one.reward for one in scored(reward, "a", "b", "c")] == [2.0] * 3


@pytest.mark.parametrize(
    ("value", "scores", "reason"),
    [
        ([1.0, None], [2.0, None], "returned None"),
        ([1.0, RewardError("unclear")], [2.0, None], "unclear"),
        ([1.0], [None, None], "batch returned [1.0] for 2 episodes"),
        (RuntimeError("out of memory"), [None, None], "RuntimeError: out of memory"),
    ],
    ids=repr,
)
def test_k74_one_score_or_reason_for_each(value: Any, scores: list[Any], reason: str) -> None:
    found = scored(Lengths(value), "a", "b")
    assert [one.reward for one in found] == scores
    assert all(reason in one.reward_failures["r"] for one in found if one.reward is None)


def test_k73_whoever_is_cancelled_is_left_out() -> None:
    reward = Lengths()

    async def one_leaves() -> list[Any]:
        batched = make_reward(lambda: reward, {})
        tasks = [asyncio.create_task(batched(episode(action))) for action in ("a", "bb")]
        await asyncio.sleep(0)
        tasks[0].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    left, stayed = asyncio.run(one_leaves())
    assert isinstance(left, asyncio.CancelledError) and stayed == 2 and reward.sizes == [1]


def test_options_that_make_no_sense_are_refused() -> None:
    class Empty(Lengths):
        batch_size = 0

    with pytest.raises(RewardError, match="batch_size is 0"):
        make_reward(Empty, {})
