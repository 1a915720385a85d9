"""Built-in rewards by hand-checked cases, and scoring that survives whatever a reward does."""

from __future__ import annotations

import asyncio
import functools
import math
import multiprocessing
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_gym.errors import RewardError
from relax_gym.metrics import episode_metrics
from relax_gym.scoring import WeightedReward, close_rewards, reward_metrics, score, to_score
from relax_gym.types import (
    Completion,
    EpisodeError,
    FinishReason,
    StopReason,
    Task,
    Trajectory,
    Turn,
)
from relax_gym.workers import WorkerThreads
from relax_gym_rewards.env_return import EnvReturn
from relax_gym_rewards.exact_match import ExactMatch
from relax_gym_rewards.math import Math
from relax_gym_rewards.numeric import Numeric
from relax_gym_rewards.turn_penalty import TurnPenalty

NOTHING = Completion(token_ids=(), logprobs=(), versions=(), finish_reason=FinishReason.STOP)


def episode(*actions: str, rewards: tuple[float | None, ...] = (), **info: Any) -> Trajectory:
    turns = tuple(
        Turn(observation=(), context_ids=(), completion=NOTHING, text=action, action=action, reward=reward)
        for action, reward in zip(actions, rewards or (0.0,) * len(actions), strict=True)
    )
    return Trajectory(
        task=Task(env_id="test/Quiz-v0", seed=0),
        episode_id="e1",
        turns=turns,
        stop_reason=StopReason.ENV_DONE,
        info=info,
    )


# --- the rewards -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ((1.0,), 1.0),
        ((0.0,), 0.0),
        ((-1.0,), -1.0),
        ((0.5, 0.25), 0.75),
        ((0.0, 0.0, 1.0), 1.0),
        ((1.0, -1.0), 0.0),
        ((None,), 0.0),
        ((0.5, None), 0.5),
        ((1e9, 1.0), 1000000001.0),
        ((-0.1, -0.1, -0.1, 2.3), 2.0),
    ],
)
def test_env_return(rewards: tuple[float | None, ...], expected: float) -> None:
    assert EnvReturn()(episode(*"a" * len(rewards), rewards=rewards)) == pytest.approx(expected, abs=1e-12)


def test_env_return_of_nan_is_nan_and_of_no_turn_is_zero() -> None:
    assert math.isnan(EnvReturn()(episode("a", "b", rewards=(1.0, math.nan))))
    assert EnvReturn()(episode()) == 0.0


@pytest.mark.parametrize(
    ("turns", "per_turn", "expected"),
    [
        (0, 0.01, 0.0),
        (1, 0.01, 0.0),
        (2, 0.01, -0.01),
        (3, 0.01, -0.02),
        (11, 0.01, -0.1),
        (1, 1.0, 0.0),
        (2, 1.0, -1.0),
        (5, 0.5, -2.0),
        (4, 0.0, 0.0),
        (101, 0.25, -25.0),
    ],
)
def test_turn_penalty(turns: int, per_turn: float, expected: float) -> None:
    assert TurnPenalty(per_turn=per_turn)(episode(*"a" * turns)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("action", "answer", "expected"),
    [
        ("Paris", "Paris", 1.0),
        ("paris", "Paris", 1.0),
        (" Paris.\n", "paris", 1.0),
        ("'Paris'.", "paris", 1.0),
        ("**New   York!**", "new york", 1.0),
        ("Paris is it", "Paris", 0.0),
        ("", "Paris", 0.0),
        ("-3", "3", 0.0),
        (".5", "5", 0.0),
        ("7", 7, 1.0),
        ("!", "?", 0.0),
        ("B", ["A", "b"], 1.0),
        ("C", ["A", "B"], 0.0),
        ("STRASSE", "straße", 1.0),
        ("Paris\nParis", "Paris", 0.0),
        ("P a r i s", "Paris", 0.0),
        ("<answer>Paris</answer>", "Paris", 0.0),
        ("Paris, or London", "Paris", 0.0),
        ("[]", "", 0.0),
        ("1.0", 1, 0.0),
        ("a-b", "a-b", 1.0),
        ("café", "cafe", 0.0),
    ],
)
def test_exact_match(action: str, answer: Any, expected: float) -> None:
    assert ExactMatch()(episode("something else", action, answer=answer)) == expected


def test_exact_match_options() -> None:
    assert ExactMatch(ignore_case=False)(episode("paris", answer="Paris")) == 0.0
    assert ExactMatch(strip_punctuation=False)(episode("Paris.", answer="Paris")) == 0.0
    assert ExactMatch(field="gold")(episode("Paris", gold="paris", answer="Rome")) == 1.0


@pytest.mark.parametrize(
    ("action", "answer", "expected"),
    [
        ("42", 42, 1.0),
        ("The answer is 42.", "42", 1.0),
        ("first 41, then 42", 42, 1.0),
        ("42, no: 41", 42, 0.0),
        ("1,234,567", 1234567, 1.0),
        ("1,2", 2, 1.0),
        ("-3", -3, 1.0),
        ("10-3", 3, 1.0),
        ("10 - 3", 3, 1.0),
        ("so -$2.50", -2.5, 1.0),
        ("−7", -7, 1.0),
        ("0.5", "1/2", 1.0),
        ("3/4", 0.75, 1.0),
        ("-3 / 4", -0.75, 1.0),
        ("5/0", 5, 0.0),
        ("12%", 0.12, 1.0),
        ("12%", 12, 1.0),
        ("12", "12%", 0.0),
        ("0.12", "12 %", 1.0),
        ("1200%", "12%", 0.0),
        (".5", 0.5, 1.0),
        ("1e3", 1000, 1.0),
        ("1e999", 5, 0.0),
        ("答案是42", 42, 1.0),
        ("H2O", 2, 0.0),
        ("I do not know", 0, 0.0),
        ("", 0, 0.0),
        ("0.333333", 1 / 3, 1.0),
        ("0.3333", 1 / 3, 0.0),
        ("5", "work: 2+3\n#### 5", 1.0),
    ],
)
def test_numeric(action: str, answer: Any, expected: float) -> None:
    assert Numeric()(episode(action, answer=answer)) == expected


def test_numeric_tolerance_is_absolute_below_one_and_relative_above() -> None:
    assert Numeric(tolerance=0.1)(episode("0.55", answer=0.5)) == 1.0
    assert Numeric(tolerance=0.1)(episode("0.65", answer=0.5)) == 0.0
    assert Numeric(tolerance=0.1)(episode("109", answer=100)) == 1.0
    assert Numeric(tolerance=0.1)(episode("111", answer=100)) == 0.0


@pytest.mark.parametrize("reward", [ExactMatch(), Numeric(), Math()])
def test_a_missing_reference_names_the_field_and_the_keys(reward: Any) -> None:
    with pytest.raises(RewardError, match=r"test/Quiz-v0 left no 'answer' in info.*its keys: 'gold', 'level'"):
        result = reward(episode("42", gold=42, level=1))
        asyncio.run(result)


@pytest.mark.parametrize("reward", [ExactMatch(), Numeric()])
def test_an_episode_without_turns_has_no_answer_to_score(reward: Any) -> None:
    with pytest.raises(RewardError, match="episode e1 has no turns"):
        reward(episode(answer=42))


def test_a_reference_without_a_number_is_an_error_not_a_zero() -> None:
    with pytest.raises(RewardError, match=r"info\['answer'\] is 'many', which holds no number"):
        Numeric()(episode("3", answer="many"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Numeric(tolerance=-1), "tolerance is -1"),
        (lambda: Numeric(tolerance=math.nan), "tolerance is nan"),
        (lambda: TurnPenalty(per_turn=-0.1), "per_turn is -0.1"),
        (lambda: Math(timeout=0), "timeout is 0"),
        (lambda: Math(workers=0), "workers 0"),
    ],
)
def test_bad_options_are_refused(make: Any, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        make()


# --- math ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checker() -> Iterator[Math]:
    reward = Math(timeout=20.0, workers=1)
    yield reward
    reward.close()


@pytest.mark.parametrize(
    ("action", "answer", "expected"),
    [
        ("The answer is 42.", "42", 1.0),
        ("43", "42", 0.0),
        (r"so \boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"$\frac{1}{2}$", "1/2", 1.0),
        ("x^2+2x+1", "(x+1)^2", 1.0),
        ("x^2+2x+2", "(x+1)^2", 0.0),
        (r"$2\sqrt{2}$", r"\sqrt{8}", 1.0),
        (r"$\{2,1\}$", r"\{1,2\}", 1.0),
        ("(1, 2)", "(1,2)", 1.0),
        ("1,234", "1234", 1.0),
        ("50%", "0.5", 1.0),
        ("A", "A", 1.0),
        ("", "42", 0.0),
        ("no idea", "42", 0.0),
        ("6", 6, 1.0),
    ],
)
def test_math(checker: Math, action: str, answer: Any, expected: float) -> None:
    assert asyncio.run(checker(episode(action, answer=answer))) == expected


def test_math_says_when_the_reference_is_no_mathematics(checker: Math) -> None:
    with pytest.raises(RewardError, match=r"info\['answer'\] is 'foo bar\?', which is no mathematical expression"):
        asyncio.run(checker(episode("3", answer="foo bar?")))


def test_k71_math_scores_one_from_main_thread_worker_thread_and_running_loop(checker: Math) -> None:
    right = episode("1/2", answer=r"\frac{1}{2}")
    scores = [asyncio.run(checker(right))]
    thread = threading.Thread(target=lambda: scores.append(asyncio.run(checker(right))))
    thread.start()
    thread.join()

    async def many() -> list[float]:
        return list(await asyncio.gather(*(checker(right) for _ in range(3))))

    assert scores + asyncio.run(many()) == [1.0] * 5


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def wait_until_gone(pids: list[int], seconds: float = 10.0) -> list[int]:
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def test_k72_an_endless_check_scores_zero_is_counted_and_leaves_no_process(checker: Math) -> None:
    checker.close()  # the processes are shared, and end with the last that uses them
    reward = Math(timeout=5, workers=1)

    async def both() -> tuple[float, float]:
        hung = await reward(episode("$9^{9^{9^9}}$", answer="$x+1$"))
        return hung, await reward(episode("x+1", answer="$x+1$"))

    before = {child.pid for child in multiprocessing.active_children()}
    assert asyncio.run(both()) == (0.0, 1.0)
    assert reward.metrics() == {"timeouts": 1.0, "crashes": 0.0}
    assert reward.metrics() == {"timeouts": 0.0, "crashes": 0.0}
    reward.close()
    assert {child.pid for child in multiprocessing.active_children()} == before


def test_k72_a_cancelled_check_ends_its_process_and_a_killed_run_leaves_no_orphans(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(
        textwrap.dedent(
            """
            import asyncio, multiprocessing, os, signal, sys
            sys.path[:0] = PATHS
            from reward_kit import episode
            from relax_gym_rewards.math import Math

            async def main():
                reward = Math(timeout=60.0, workers=1)
                check = asyncio.create_task(reward(episode("$9^{9^{9^9}}$", answer="$x+1$")))
                await asyncio.sleep(1.5)
                first = [child.pid for child in multiprocessing.active_children()]
                if sys.argv[1] == "cancel":
                    check.cancel()
                    await asyncio.wait([check])
                    print(check.cancelled(), *first, flush=True)
                    while set(first) & {child.pid for child in multiprocessing.active_children()}:
                        await asyncio.sleep(0.05)
                    print(await reward(episode("1", answer="1.0")), flush=True)
                else:
                    print(*first, flush=True)
                    os.kill(os.getpid(), signal.SIGKILL)

            if __name__ == "__main__":
                asyncio.run(main())
            """
        ).replace("PATHS", repr(sys.path))
    )
    done = subprocess.run([sys.executable, str(script), "cancel"], capture_output=True, text=True, timeout=60)
    cancelled, *pids = done.stdout.split()
    assert (cancelled, pids[1:], done.returncode) == ("True", ["1.0"], 0), done.stderr
    assert wait_until_gone([int(pids[0])]) == []
    killed = subprocess.run([sys.executable, str(script), "kill"], stdout=subprocess.PIPE, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    orphans = [int(pid) for pid in killed.stdout.split()]
    assert len(orphans) == 1 and wait_until_gone(orphans) == []


def test_k73_cancelling_a_check_propagates_and_is_not_a_wrong_answer(checker: Math) -> None:
    async def cancelled() -> bool:
        task = asyncio.create_task(checker(episode("1", answer="2.0")))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert asyncio.run(cancelled()) is True


@pytest.mark.parametrize(
    "payload",
    [
        "__import__('os').system('touch {file}')",
        "$__import__('os').system('touch {file}')$",
        r"\boxed{{__import__('pathlib').Path('{file}').touch()}}",
        "exec(\"open('{file}', 'w')\")",
        r"$\input{{{file}}}$",
    ],
)
def test_k81_a_crafted_answer_has_no_side_effect(checker: Math, tmp_path: Path, payload: str) -> None:
    file = tmp_path / "pwned"
    assert asyncio.run(checker(episode(payload.format(file=file), answer="42"))) == 0.0
    assert not file.exists()


# --- scoring ---------------------------------------------------------------------------------------------------------


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
