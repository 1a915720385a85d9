"""Scoring survives whatever a reward does, and says which number counts."""

from __future__ import annotations

import asyncio
import functools
import math
import threading
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from reward_kit import episode

from relax_gym.metrics import episode_metrics
from relax_gym.scoring import WeightedReward, close_rewards, reward_metrics, score, to_score
from relax_gym.types import EpisodeError, StopReason, Task, Trajectory
from relax_gym.workers import WorkerThreads
from relax_gym_rewards.env_return import EnvReturn
from relax_gym_rewards.turn_penalty import TurnPenalty


def scored(*terms: Any, trajectory: Trajectory | None = None, timeout: float = 5.0) -> Trajectory:
    rewards = [
        term if isinstance(term, WeightedReward) else WeightedReward(name=f"r{index}", weight=1.0, reward=term)
        for index, term in enumerate(terms)
    ]
    return asyncio.run(score(trajectory or episode("a", rewards=(0.5,)), rewards, timeout=timeout))


def test_scores_are_weighted_and_summed_sync_and_async_alike() -> None:
    async def later(trajectory: Trajectory) -> float:
        await asyncio.sleep(0)
        return 2.0

    class Counting:
        async def __call__(self, trajectory: Trajectory, /) -> float:
            return float(len(trajectory.turns))

    out = scored(
        WeightedReward(name="env", weight=2.0, reward=EnvReturn()),
        WeightedReward(name="later", weight=-0.5, reward=later),
        WeightedReward(name="count", weight=1.0, reward=Counting()),
        WeightedReward(name="partial", weight=1.0, reward=functools.partial(later)),
        WeightedReward(name="lambda", weight=1.0, reward=lambda trajectory: later(trajectory)),
    )
    assert out.rewards == {"env": 1.0, "later": -1.0, "count": 1.0, "partial": 2.0, "lambda": 2.0}
    assert (out.reward, out.reward_failures) == (5.0, {})


def test_sync_rewards_run_off_the_loop_and_async_ones_on_it() -> None:
    seen: dict[str, int] = {}

    def sync(trajectory: Trajectory) -> float:
        seen["sync"] = threading.get_ident()
        return 0.0

    async def on_loop(trajectory: Trajectory) -> float:
        seen["async"] = threading.get_ident()
        return 0.0

    scored(sync, on_loop)
    assert seen["async"] == threading.get_ident() != seen["sync"]


def raising(trajectory: Trajectory) -> float:
    raise KeyError("no such thing")


def test_k34_exactly_one_score_for_each_reward_whatever_fails() -> None:
    def leaving(trajectory: Trajectory) -> float:
        raise SystemExit(3)

    def stopping(trajectory: Trajectory) -> float:
        raise StopIteration

    async def async_raising(trajectory: Trajectory) -> float:
        raise ValueError("bad")

    out = scored(raising, EnvReturn(), leaving, stopping, async_raising)
    assert out.rewards == {"r0": None, "r1": 0.5, "r2": None, "r3": None, "r4": None}
    assert sorted(out.reward_failures) == ["r0", "r2", "r3", "r4"]
    assert out.reward_failures["r0"].startswith("KeyError: 'no such thing' (") and __file__ in out.reward_failures["r0"]
    assert out.reward_failures["r4"].startswith("ValueError: bad")
    assert out.reward is None


def test_k72_a_reward_that_hangs_is_given_up_and_the_others_keep_their_scores() -> None:
    release = threading.Event()

    def hanging(trajectory: Trajectory) -> float:
        release.wait(30)
        return 1.0

    async def stubborn(trajectory: Trajectory) -> float:
        while not release.is_set():
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                if not release.is_set():
                    release.set()
        return 1.0

    out = scored(hanging, EnvReturn(), stubborn, timeout=0.2)
    assert out.rewards == {"r0": None, "r1": 0.5, "r2": None}
    assert out.reward_failures == dict.fromkeys(("r0", "r2"), "took longer than 0.2 s (rollout.reward_timeout)")


def test_a_timeout_of_the_rewards_own_is_told_apart_from_the_limit() -> None:
    def slow_judge(trajectory: Trajectory) -> float:
        raise TimeoutError("the judge did not answer")

    assert scored(slow_judge).reward_failures["r0"].startswith("TimeoutError: the judge did not answer (")


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_k73_cancellation_propagates_through_scoring(kind: str) -> None:
    release = threading.Event()

    def sync(trajectory: Trajectory) -> float:
        release.wait(30)
        return 1.0

    async def waiting(trajectory: Trajectory) -> float:
        await asyncio.sleep(30)
        return 1.0

    async def run() -> bool:
        term = WeightedReward(name="r", weight=1.0, reward=sync if kind == "sync" else waiting)
        task = asyncio.create_task(score(episode("a"), [term], timeout=30))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    try:
        assert asyncio.run(run()) is True
    finally:
        release.set()


def test_k73_a_reward_that_cancels_itself_is_unscored_not_the_end_of_the_run() -> None:
    async def rude(trajectory: Trajectory) -> float:
        raise asyncio.CancelledError

    out = scored(rude, EnvReturn())
    assert out.rewards == {"r0": None, "r1": 0.5}
    assert out.reward_failures == {"r0": "the reward cancelled itself"}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "returned None; a reward is one finite number"),
        (math.nan, "returned nan; a reward is one finite number"),
        (math.inf, "returned inf; a reward is one finite number"),
        (-math.inf, "returned -inf; a reward is one finite number"),
        ("1.0", "returned '1.0'; a reward is one finite number"),
        ({1.0}, "returned {1.0}; a reward is one finite number"),
    ],
)
def test_k74_a_score_that_is_no_number_leaves_the_episode_unscored(value: Any, message: str) -> None:
    out = scored(lambda trajectory: value)
    assert (out.rewards, out.reward_failures, out.reward) == ({"r0": None}, {"r0": message}, None)


def test_k74_a_weight_that_makes_a_score_infinite_leaves_it_unscored() -> None:
    out = scored(WeightedReward(name="big", weight=1e300, reward=lambda trajectory: 1e300))
    assert out.rewards == {"big": None}


def test_k76_raw_scores_stay_apart_from_shaping() -> None:
    out = scored(
        WeightedReward(name="env", weight=1.0, reward=EnvReturn()),
        WeightedReward(name="turn_penalty", weight=2.0, reward=TurnPenalty(per_turn=0.25)),
        trajectory=episode("a", "b", rewards=(0.0, 1.0)),
    )
    assert out.rewards == {"env": 1.0, "turn_penalty": -0.5}
    assert (out.reward, out.env_return) == (0.5, 1.0)


def test_k77_a_dict_is_refused_with_its_keys() -> None:
    def parts(trajectory: Trajectory) -> Mapping[str, float]:
        return {"format": 1.0, "answer": 0.0}

    out = scored(parts)
    reason = (
        "returned a mapping with keys ['format', 'answer']; a reward is one number: set key = … in its [[reward]] to "
        "the one that counts"
    )
    assert (out.rewards, out.reward_failures) == ({"r0": None}, {"r0": reason})


def keyed(value: Any, key: str, weight: float = 1.0) -> Trajectory:
    return scored(WeightedReward(name="math", weight=weight, reward=lambda trajectory: value, key=key))


def test_k77_the_key_says_which_number_of_a_mapping_counts() -> None:
    answer = {"accuracy": 1.0, "format": np.float32(0.5), "length": 7, "note": "good", "ratio": math.nan}
    out = keyed(answer, "accuracy", weight=2.0)
    assert (out.rewards, out.reward, out.reward_failures) == ({"math": 2.0}, 2.0, {})
    assert out.reward_parts == {"math/format": 0.5, "math/length": 7.0}
    metrics = episode_metrics([out, keyed({"accuracy": 0.0, "format": 1.0}, "accuracy")])
    assert {name: value for name, value in metrics.items() if name.startswith("reward/math")} == {
        "reward/math": 1.0,
        "reward/math/format": 0.75,
        "reward/math/length": 7.0,
    }


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            {"acuracy": 1.0, "format": 0.0},
            "nothing under key = 'accuracy'; did you mean 'acuracy'? Known: acuracy, format",
        ),
        (1.0, "1.0; with key = 'accuracy' in its [[reward]] it must return a mapping"),
        ({"accuracy": "high"}, "'high'; a reward is one finite number"),
        (None, "None; a reward is one finite number"),
    ],
)
def test_k77_a_missing_key_says_what_is_there(value: Any, message: str) -> None:
    out = keyed(value, "accuracy")
    assert (out.rewards, out.reward_failures, out.reward_parts) == ({"math": None}, {"math": f"returned {message}"}, {})


class Counting:
    """Counts its calls; closes in one of several ways."""

    def __init__(self, closing: str = "sync") -> None:
        self.calls, self.closed, self.closing = 0, 0, closing

    def __call__(self, trajectory: Trajectory) -> float:
        self.calls += 1
        return 1.0

    def metrics(self) -> Mapping[str, float]:
        if self.closing == "raise":
            raise ValueError("lost")
        calls, self.calls = self.calls, 0
        return {"calls": calls}

    def close(self) -> Any:
        if self.closing == "raise":
            raise OSError("gone")
        if self.closing == "async":
            return self._close()
        self.closed += 1
        return None

    async def _close(self) -> None:
        await asyncio.sleep(0)
        self.closed += 1


def test_rewards_may_have_metrics_and_close(caplog: pytest.LogCaptureFixture) -> None:
    parts = {closing: Counting(closing) for closing in ("raise", "sync", "async")}
    terms = [WeightedReward(name=name, weight=1.0, reward=reward) for name, reward in parts.items()]
    terms.append(WeightedReward(name="env", weight=1.0, reward=EnvReturn()))

    async def run() -> None:
        threads = WorkerThreads("reward")
        await score(episode("a"), terms, timeout=5, threads=threads)
        assert reward_metrics(terms) == {"reward/sync/calls": 1.0, "reward/async/calls": 1.0}
        assert reward_metrics(terms) == {"reward/sync/calls": 0.0, "reward/async/calls": 0.0}
        await close_rewards(terms, timeout=5, threads=threads)
        threads.close()

    asyncio.run(run())
    assert [reward.closed for reward in parts.values()] == [0, 1, 1]
    assert [record.message for record in caplog.records] == ["reward raise: metrics() failed"] * 2 + [
        "reward raise: close() failed"
    ]


def test_scores_of_other_number_types_are_taken() -> None:
    values = [True, 2, np.float32(0.5), np.int64(3), np.bool_(True), np.array(1.5), Fraction(1, 4)]
    assert [to_score(value) for value in values] == [1.0, 2.0, 0.5, 3.0, 1.0, 1.5, 0.25]


def test_an_episode_that_ended_in_an_error_is_unscored() -> None:
    error = EpisodeError(env_id="test/Quiz-v0", seed=0, turn=1, message="boom", traceback="")
    broken = Trajectory(
        task=Task(env_id="test/Quiz-v0", seed=0), episode_id="e", turns=(), stop_reason=StopReason.ERROR, error=error
    )
    out = scored(EnvReturn(), trajectory=broken)
    assert out.rewards == {"r0": None}
    assert out.reward_failures == {"r0": "the episode ended in an error: boom"}


def test_lent_threads_are_used_and_stay_open() -> None:
    names = []

    def named(trajectory: Trajectory) -> float:
        names.append(threading.current_thread().name)
        return 1.0

    async def twice() -> None:
        threads = WorkerThreads("lent")
        for _ in range(2):
            term = WeightedReward(name="r", weight=1.0, reward=named)
            assert (await score(episode("a"), [term], timeout=5, threads=threads)).reward == 1.0
        threads.close()

    asyncio.run(twice())
    assert names == ["lent-1", "lent-1"]


def test_a_reward_whose_close_cancels_its_own_task_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    closed = []

    class Background:
        async def close(self) -> None:
            own = asyncio.ensure_future(asyncio.sleep(60))
            own.cancel()
            await own

    class Other:
        def close(self) -> None:
            closed.append(True)

    terms = [WeightedReward(name=type(one).__name__, weight=1.0, reward=one) for one in (Background(), Other())]
    asyncio.run(close_rewards(terms, timeout=5.0))
    assert closed == [True]
    assert "reward Background: close() failed" in caplog.text
