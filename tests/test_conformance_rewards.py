"""The checker of rewards says yes to what is right and names what is wrong."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest

from relax_gym import StopReason, Task, Trajectory
from relax_gym.testing import check_reward


def trajectory(text: str) -> Trajectory:
    message = {"role": "user", "content": text}
    return Trajectory(
        task=Task(env_id="test/Env-v0", seed=3),
        episode_id=f"e-{text}",
        turns=(),
        stop_reason=StopReason.ENV_DONE,
        final_observation=(message,),
    )


async def async_length(trajectory: Trajectory) -> float:
    await asyncio.sleep(0)
    return float(len(trajectory.final_observation[0]["content"]))


def unscored(trajectory: Trajectory) -> float | None:
    return None if trajectory.final_observation[0]["content"] == "ab" else float("nan")


def test_right_rewards_pass() -> None:
    episodes = [trajectory("ab"), trajectory("abcd")]
    results = check_reward(async_length, episodes)
    assert [result.name for result in results] == ["number", "repeat", "read-only", "thread"]
    assert all(result.passed for result in results)
    assert results[0].detail == "2 scored, 0 unscored, 2 to 4"
    results = check_reward(unscored, episodes)
    assert all(result.passed for result in results)
    assert results[0].detail == "0 scored, 2 unscored"


_made = itertools.count()


def in_main_only(trajectory: Trajectory) -> float:
    return float(threading.current_thread() is threading.main_thread())


def vandal(trajectory: Trajectory) -> float:
    trajectory.final_observation[0]["content"] += "!"
    return 0.0


def crash(trajectory: Trajectory) -> float:
    raise KeyError("gold")


@pytest.mark.parametrize(
    ("reward", "point", "detail"),
    [
        (lambda t: "1", "number", "gave '1' for episode e-ab; it must give a number, a mapping of numbers, or None"),
        (lambda t: True, "number", "gave True for episode e-ab"),
        (crash, "number", "failed on episode e-ab of test/Env-v0 seed 3: KeyError: 'gold'"),
        (lambda t: next(_made), "repeat", "for the same episode e-ab"),
        (vandal, "read-only", "changed episode e-ab; rewards must only read it"),
        (in_main_only, "thread", "gave 1.0 here and 0.0 in a worker thread"),
    ],
)
def test_k71_a_broken_reward_is_caught_at_its_point(reward: Callable[..., Any], point: str, detail: str) -> None:
    broken = {result.name: result.detail for result in check_reward(reward, [trajectory("ab")]) if not result.passed}
    assert detail in broken[point]
