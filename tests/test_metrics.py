"""The numbers of an evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from train_cases import half_a, run, trainer

from relax_gym.cli.runs import evaluation_rows
from relax_gym.env import check_reset, check_step
from relax_gym.errors import EnvError
from relax_gym.metrics import accuracy, evaluation_metrics
from relax_gym.scoring import WeightedReward
from relax_gym.types import EpisodeError, StopReason, Task, Trajectory


def episode(
    stop: StopReason, reward: float | None, *, env: str = "test/A-v0", failed: bool = False, **info: Any
) -> Trajectory:
    error = EpisodeError(env_id=env, seed=0, turn=0, message="m", traceback="t") if failed else None
    rewards = {"env": reward}
    return Trajectory(
        task=Task(env_id=env, seed=0),
        episode_id="e",
        turns=(),
        stop_reason=stop,
        rewards=rewards,
        info=info,
        error=error,
    )


SOLVED = episode(StopReason.ENV_DONE, 1.0, correct=True)
WRONG = episode(StopReason.ENV_DONE, 0.0, correct=False)
CUT = episode(StopReason.MAX_TURNS, 0.0)
LATE = episode(StopReason.TIMEOUT, 0.0)
FAILED = episode(StopReason.ERROR, None, failed=True)
FAILED_AFTER_A_GOOD_TURN = episode(StopReason.ERROR, None, failed=True, correct=True)
NO_REPORT = episode(StopReason.ENV_DONE, 0.5, correct=None)
SILENT = episode(StopReason.ENV_DONE, 0.5, env="test/B-v0")


@pytest.mark.parametrize(
    ("episodes", "expected"),
    [
        ([SOLVED, WRONG], 0.5),
        ([SOLVED, CUT], 0.5),
        ([SOLVED, LATE, CUT, FAILED], 0.25),
        ([SOLVED, FAILED_AFTER_A_GOOD_TURN], 0.5),
        ([SOLVED, SILENT, SILENT], 1.0),
        ([SILENT], None),
        ([NO_REPORT], None),
        ([SOLVED, NO_REPORT], 0.5),
        ([CUT, FAILED], None),
        ([], None),
    ],
)
def test_accuracy_counts_what_never_got_to_report(episodes: list[Trajectory], expected: float | None) -> None:
    assert accuracy(episodes) == expected


@pytest.mark.parametrize("correct", [True, False, np.True_, 1, 0.0, np.float32(1), np.int64(0), None])
def test_what_an_env_may_report(correct: Any) -> None:
    assert check_reset(([], {"correct": correct}))[1] == {"correct": correct}
    assert check_step(([], 0.0, True, False, {"correct": correct})).info == {"correct": correct}


@pytest.mark.parametrize("correct", ["no", 0.2, 2, float("nan"), np.array([True, False]), np.array([True]), [True]])
def test_a_report_that_is_neither_yes_nor_no_is_an_error_of_the_env(correct: Any) -> None:
    for check, result in ((check_reset, ([],)), (check_step, ([], 0.0, True, False))):
        with pytest.raises(EnvError, match=r"returned info\['correct'\] = .* True or False .* partial credit belongs"):
            check((*result, {"correct": correct}))


def test_the_log_and_the_command_line_tell_the_same() -> None:
    episodes = [SOLVED, SOLVED, CUT, FAILED, SILENT]
    metrics = evaluation_metrics(episodes)
    assert metrics["eval/accuracy"] == metrics["eval/test/A-v0/accuracy"] == 0.5
    assert metrics["eval/test/A-v0/reward"] == pytest.approx(2 / 3)
    assert metrics["eval/test/A-v0/errors"] == 1
    assert "eval/test/B-v0/accuracy" not in metrics
    assert [row[:4] for row in evaluation_rows(episodes)] == [
        ("test/A-v0", "4", "0.667", "0.500"),
        ("test/B-v0", "1", "0.500", "-"),
    ]


def test_shares_and_latencies_are_logged_by_env_where_there_are_several(tmp_path: Path) -> None:
    envs = [{"id": "test/OneOrTwo-v0"}, {"id": "test/Nan-v0"}]
    metrics = run(trainer(tmp_path / "two", half_a, env=envs, train={"steps": 1, "groups_per_step": 16})).metrics
    shares = [metrics[f"queue/consumed_share/{env['id']}"] for env in envs]
    assert sum(shares) == 1
    assert all(0 < share < 1 for share in shares)
    for env in envs:
        tail = [metrics[f"time/episode_{name}/{env['id']}"] for name in ("p50", "p95", "max")]
        assert 0 < tail[0] <= tail[1] <= tail[2] <= metrics["time/episode_max"]
    metrics = run(trainer(tmp_path / "one", half_a, train={"steps": 1})).metrics
    assert not [name for name in metrics if name.startswith(("queue/consumed_share", "time/episode_p50/"))]


def test_a_name_that_is_logged_twice_in_a_step_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Judge:
        def __call__(self, trajectory: Trajectory) -> dict[str, float]:
            return {"score": 1.0, "calls": 0.5, "other": 2.0}

        def metrics(self) -> dict[str, float]:
            return {"calls": 8.0}

    loop = trainer(tmp_path, half_a, train={"steps": 1})
    loop._player._rewards = [WeightedReward(name="judge", weight=1.0, reward=Judge(), key="score")]
    metrics = run(loop).metrics
    assert (metrics["reward/judge/calls"], metrics["reward/judge/other"]) == (8.0, 2.0)
    (warning,) = [record.getMessage() for record in caplog.records if "rename one" in record.getMessage()]
    assert warning.startswith("metric reward/judge/calls is 0.5 and 8 in one step, and the latter is kept; ")
