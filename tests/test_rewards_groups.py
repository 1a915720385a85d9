"""Rewards that see a whole group, and rewards with a number for each turn."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from reward_kit import episode

from relax_gym.endpoint import evaluate as endpoint_evaluate
from relax_gym.errors import ConfigError, RewardError
from relax_gym.plugins import plugins
from relax_gym.rescoring import load_reward, rescore, text_case
from relax_gym.scoring import WeightedReward, score, score_group
from relax_gym.testing import check_reward
from relax_gym.types import EpisodeError, Trajectory


class Rank:
    """The share of the others whose last action is shorter."""

    def score_group(self, trajectories: Sequence[Trajectory]) -> list[float]:
        sizes = [len(one.turns[-1].action) for one in trajectories]
        return [sum(other < size for other in sizes) / max(1, len(sizes) - 1) for size in sizes]


class Members:
    """How many are in the group, and async; notes in which thread it runs."""

    key = "members"
    thread = ""

    async def score_group(self, trajectories: Sequence[Trajectory]) -> list[Any]:
        self.thread = threading.current_thread().name
        return [{"members": len(trajectories), "at": at} for at in range(len(trajectories))]


class Returns:
    """What it is told to."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def score_group(self, trajectories: Sequence[Trajectory]) -> Any:
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


class Steps:
    """For each turn the length of its action."""

    def __call__(self, trajectory: Trajectory) -> list[int]:
        return [len(turn.action) for turn in trajectory.turns]


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    table = plugins().tables["reward"]
    table.add("test_rank", Rank, "test")


def grouped(trajectories: Sequence[Trajectory], *terms: WeightedReward, timeout: float = 30.0) -> list[Trajectory]:
    async def both() -> list[Trajectory]:
        scored = [await score(one, terms, timeout=timeout) for one in trajectories]
        return await score_group(scored, terms, timeout=timeout)

    return asyncio.run(both())


def weighted(name: str, reward: Any, weight: float = 1.0) -> WeightedReward:
    return WeightedReward(name=name, weight=weight, key=getattr(reward, "key", None), reward=reward)


def test_each_episode_is_scored_beside_the_others_with_weight_and_parts() -> None:
    members = Members()
    terms = [weighted("rank", Rank(), 2.0), weighted("steps", Steps()), weighted("members", members)]
    found = grouped([episode("a"), episode("abc"), episode("ab")], *terms)
    assert [dict(one.rewards) for one in found] == [
        {"rank": 0.0, "steps": 1.0, "members": 3.0},
        {"rank": 2.0, "steps": 3.0, "members": 3.0},
        {"rank": 1.0, "steps": 2.0, "members": 3.0},
    ]
    assert [one.reward_parts for one in found] == [{"members/at": at} for at in (0.0, 1.0, 2.0)]
    assert not any(one.reward_failures for one in found)
    assert members.thread == "MainThread", "async: on the loop"


def test_k74_an_episode_that_failed_is_in_no_group() -> None:
    error = EpisodeError(env_id="e", seed=0, turn=0, message="broken", traceback="")
    found = grouped(
        [episode("a"), dataclasses.replace(episode("ab"), error=error), episode("abc")], weighted("r", Rank())
    )
    assert [one.reward for one in found] == [0.0, None, 1.0]
    assert found[1].reward_failures == {"r": "the episode ended in an error: broken"}


@pytest.mark.parametrize(
    ("value", "scores", "reason"),
    [
        ([1.0, None], [1.0, None], "returned None"),
        ([float("nan"), 2], [None, 2.0], "returned nan"),
        ([RewardError("unclear"), 2], [None, 2.0], "unclear"),
        ([1.0], [None, None], "returned [1.0] for 2 episodes"),
        (None, [None, None], "returned None for 2 episodes"),
        (3.0, [None, None], "it must return a list with one score for each"),
        (RuntimeError("no judge"), [None, None], "RuntimeError: no judge"),
    ],
    ids=repr,
)
def test_k74_one_score_or_reason_for_each_whatever_it_returns(value: Any, scores: Any, reason: str) -> None:
    found = grouped([episode("a"), episode("b")], weighted("r", Returns(value)))
    assert [one.reward for one in found] == scores
    failed = [one.reward_failures["r"] for one in found if one.reward is None]
    assert all(reason in why for why in failed)


def test_a_group_that_takes_too_long_is_unscored() -> None:
    class Hangs:
        async def score_group(self, trajectories: Any) -> Any:
            await asyncio.Event().wait()

    found = grouped([episode("a"), episode("b")], weighted("r", Hangs()), timeout=0.05)
    assert [one.reward_failures["r"] for one in found] == ["took longer than 0.05 s (rollout.reward_timeout)"] * 2


def test_an_episode_that_no_group_was_made_for_is_unscored() -> None:
    found = asyncio.run(score(episode("a"), [weighted("r", Rank())], timeout=30))
    assert found.reward is None
    assert "this episode was in none" in found.reward_failures["r"]


def test_groups_are_made_again_when_episodes_are_scored_again(tmp_path: Path) -> None:
    cases = [text_case("a", question="1"), text_case("abc", question="2"), text_case("ab", question="1")]
    assert [one.reward for one in rescore(cases, load_reward("test_rank", {}), timeout=30)] == [0.0, 0.0, 1.0]


def test_composites_and_endpoints_refuse_rewards_of_groups(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the term 'test_rank' of rewards scores groups"):
        load_reward("weighted_sum", {"rewards": [{"name": "test_rank"}]})
    with pytest.raises(ConfigError, match=r"--reward rank scores groups .* relax-gym rewards try rank "):
        endpoint_evaluate._refuse_groups([weighted("rank", Rank())], tmp_path)


@pytest.mark.parametrize("reward", [Rank(), Members(), Steps()])
def test_they_keep_the_contract_of_rewards(reward: Any) -> None:
    results = check_reward(reward, [episode("b"), episode("ab", "c")])
    assert [result for result in results if not result.passed] == []
    assert any("2 scored" in result.detail for result in results)


def test_the_contract_of_groups_is_one_score_for_each() -> None:
    results = check_reward(Returns([1.0]), [episode("a"), episode("b")])
    assert [result.detail for result in results if not result.passed] == [
        "score_group gave [1.0] for 2 episodes; it must give one score for each"
    ]


# ---- per turn --------------------------------------------------------------------------------------------------------


def scored(reward: Any, *actions: str, weight: float = 1.0) -> Trajectory:
    return asyncio.run(score(episode(*actions), [weighted("r", reward, weight)], timeout=30))


def test_a_number_for_each_turn_adds_up() -> None:
    found = scored(Steps(), "a", "bcd", weight=0.5)
    assert (found.reward, found.reward_turns) == (2.0, {"r": (0.5, 1.5)})


def test_a_list_under_a_key() -> None:
    def several(trajectory: Trajectory) -> dict[str, Any]:
        return {"steps": [1, 2], "other": 5.0}

    several.key = "steps"  # type: ignore[attr-defined]
    found = scored(several, "a", "b")
    assert (found.reward, found.reward_turns, found.reward_parts) == (3.0, {"r": (1.0, 2.0)}, {"r/other": 5.0})


@pytest.mark.parametrize(
    ("value", "reason"),
    [([1.0], "1 numbers for 2 turns"), ([1.0, None], "returned None"), ([1.0, float("inf")], "returned inf")],
)
def test_k74_turns_without_a_number_leave_the_episode_unscored(value: Any, reason: str) -> None:
    found = scored(lambda trajectory: value, "a", "b")
    assert found.reward is None
    assert found.reward_turns == {}
    assert reason in found.reward_failures["r"]
