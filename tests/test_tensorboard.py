"""Metrics come back out of TensorBoard's own reader."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from relax_gym.config import EnvConfig, ModelConfig, RunConfig, TrainConfig
from relax_gym.context import RunContext
from relax_gym_plugins.trackers.tensorboard import TensorBoardOptions, TensorBoardTracker

CONFIG = RunConfig(
    model=ModelConfig(name="tiny-qwen3"),
    env=(EnvConfig(id="x/Y-v0"),),
    train=TrainConfig(steps=1, groups_per_step=1, group_size=2),
)


def tracker(run_dir: Path, start_step: int = 0) -> TensorBoardTracker:
    context = RunContext(
        config=CONFIG, run_dir=run_dir, model_path=run_dir, tokenizer=cast("None", None), start_step=start_step
    )
    return TensorBoardTracker(context, TensorBoardOptions())


def read(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return {tag: [(point.step, point.value) for point in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_metrics_are_scalars_under_their_own_names(tmp_path: Path) -> None:
    written = tracker(tmp_path)
    written.log(0, {"eval/reward": 0.25})
    written.log(1, {"reward/mean": 0.5, "loss": -1.0})
    written.log(2, {"reward/mean": 0.75})
    written.close()
    written.close()
    assert read(tmp_path) == {"eval/reward": [(0, 0.25)], "reward/mean": [(1, 0.5), (2, 0.75)], "loss": [(1, -1.0)]}


def test_a_resumed_run_has_each_point_once(tmp_path: Path) -> None:
    killed = tracker(tmp_path)
    for step in (0, 1, 2, 3):
        killed.log(step, {"loss": float(step)})
    killed.close()
    resumed = tracker(tmp_path, start_step=2)  # the checkpoint was written at step 2
    for step in (3, 4):
        resumed.log(step, {"loss": step / 2})
    resumed.close()
    assert read(tmp_path) == {"loss": [(0, 0.0), (1, 1.0), (2, 2.0), (3, 1.5), (4, 2.0)]}


def test_a_run_resumed_without_a_checkpoint_has_each_point_once(tmp_path: Path) -> None:
    for loss in (1.0, 2.0):
        killed = tracker(tmp_path)
        for step in (0, 1):
            killed.log(step, {"loss": loss})
        killed.close()
    assert read(tmp_path) == {"loss": [(0, 2.0), (1, 2.0)]}


def test_a_run_that_logs_nothing_hides_nothing(tmp_path: Path) -> None:
    killed = tracker(tmp_path)
    killed.log(1, {"loss": 1.0})
    killed.close()
    tracker(tmp_path).close()
    assert read(tmp_path) == {"loss": [(1, 1.0)]}
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1


def test_logging_after_close_is_an_error(tmp_path: Path) -> None:
    written = tracker(tmp_path)
    written.close()
    with pytest.raises(RuntimeError, match="is closed"):
        written.log(1, {"loss": 0.0})
