"""A run that is stopped or killed at any moment goes on as if nothing had happened, and loses no finished group."""

import asyncio
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from test_end_to_end import EXAMPLE, results, weights
from train_cases import half_a, trainer

import relax_gym
from relax_gym.config import load_config
from relax_gym.errors import RunFolderError, Stopped
from relax_gym.lines import read_lines
from relax_gym.run_folder import list_checkpoints
from relax_gym.testing import RecordingLearner
from relax_gym.train import train
from relax_gym.types import Batch

TWO_ENVS = [
    "threads=1",
    "warmup.steps=2",
    "warmup.episodes_per_step=4",
    "train.groups_per_step=2",
    "train.group_size=2",
    "train.steps=3",
    "eval.episodes=2",
    "eval.every=2",
    "checkpoint.every=1",
    "checkpoint.keep=9",
]


def two_envs(run_dir: Path) -> Any:
    config = load_config(EXAMPLE, [f"run_dir={run_dir}", *TWO_ENVS])
    other = config.env[0].model_copy(update={"weight": 2.0})
    return config.model_copy(update={"env": (config.env[0], other)})


@pytest.mark.slow
def test_k113_a_run_resumed_after_any_step_equals_one_that_was_not(tmp_path: Path) -> None:
    """Ids, order, losses, evaluations and weights; with a warm-up and two envs."""
    train(two_envs(tmp_path / "whole"))
    whole = results(tmp_path / "whole")
    assert {line["mixture"] for line in whole[1]} == {0, 1}
    for k in (1, 2):
        again = tmp_path / f"from-{k}"
        shutil.copytree(tmp_path / "whole", again)
        for step, folder in list_checkpoints(again):
            if step > k:
                shutil.rmtree(folder)
        train(two_envs(again), resume=True)
        assert results(again) == whole
        one, other = weights(tmp_path / "whole", 3), weights(again, 3)
        assert all(one[name].equal(other[name]) for name in one)


# Asynchronous ---------------------------------------------------------------------------------------------------------


class Waits(RecordingLearner):
    """Steps once as many groups have been finished as can be; asks for a stop in the step that is named."""

    def __init__(self, queued: int, stop_at: int | None = None) -> None:
        super().__init__()
        self.queued, self.stop_at = queued, stop_at
        self.loop: Any = None

    def step(self, batch: Batch) -> dict[str, float]:
        if self.version + 1 == self.stop_at:
            while self.loop._queue.queued < self.queued:
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGTERM)
        return super().step(batch)


def go_on(loop: Any) -> None:
    learner = loop._learner
    if isinstance(learner, Waits):
        learner.loop = loop
    asyncio.run(loop.run())


@pytest.mark.parametrize("order", ["slot", "ready"])
def test_groups_that_were_finished_and_queued_are_trained_on_after_resume(tmp_path: Path, order: str) -> None:
    sections: dict[str, Any] = {"train": {"steps": 5, "max_staleness": 2, "order": order}}
    with pytest.raises(BaseExceptionGroup) as caught:
        go_on(trainer(tmp_path, half_a, Waits(4, stop_at=1), **sections))
    assert caught.group_contains(Stopped)
    lines = read_lines(tmp_path / "run" / "episodes.jsonl")
    queued = {line["episode_id"] for line in lines if line["kind"] == "queued"}
    assert len(queued) >= 16

    sampled: list[str] = []

    class Counting:
        @relax_gym.hookimpl
        def on_episode_end(self, trajectory: Any) -> None:
            sampled.append(trajectory.episode_id)

    observer = Counting()
    relax_gym.plugins.plugins().manager.register(observer)
    try:
        go_on(trainer(tmp_path, half_a, RecordingLearner(), resume=True, **sections))
    finally:
        relax_gym.plugins.plugins().manager.unregister(observer)
    assert not queued & set(sampled)
    trained = [line for line in read_lines(tmp_path / "run" / "episodes.jsonl") if line["kind"] == "train"]
    assert sorted(line["slot"] for line in trained) == sorted([slot for slot in range(10) for _ in range(4)])
    assert queued <= {line["episode_id"] for line in trained}
    assert not list((tmp_path / "run" / "queue").iterdir())


def test_a_group_of_weights_that_were_lost_is_dropped_as_stale_and_sampled_again(tmp_path: Path) -> None:
    sections: dict[str, Any] = {"train": {"steps": 4, "max_staleness": 1}, "checkpoint": {"every": 1, "keep": 9}}
    with pytest.raises(BaseExceptionGroup):
        go_on(trainer(tmp_path, half_a, Waits(2, stop_at=3), **sections))
    for step, folder in list_checkpoints(tmp_path / "run"):
        if step > 1:
            shutil.rmtree(folder)
    go_on(trainer(tmp_path, half_a, RecordingLearner(), resume=True, **sections))
    lines = read_lines(tmp_path / "run" / "episodes.jsonl")
    assert {line["slot"] for line in lines if line["kind"] == "stale"}
    trained = [line["slot"] for line in lines if line["kind"] == "train"]
    assert sorted(trained) == [slot for slot in range(8) for _ in range(4)]
    dropped = sum(line.get("queue/dropped_stale", 0) for line in read_lines(tmp_path / "run" / "metrics.jsonl"))
    assert dropped == len({line["slot"] for line in lines if line["kind"] == "stale"})


# kill -9 --------------------------------------------------------------------------------------------------------------

KILLS = {0: 50, 2: 15}
STEPS = {0: 160, 2: 60}


class Sums(RecordingLearner):
    """Its loss depends on every batch there has been, in their order."""

    def step(self, batch: Batch) -> dict[str, float]:
        self.version += 1
        time.sleep(0.01)  # so that not even a fast machine comes to the end between the kills
        loss = sum((i + 1) * sum(sample.token_ids) for i, sample in enumerate(batch.samples)) * self.version % 9973
        return {"loss": float(loss)}


def long_run(folder: Path, *, resume: bool, max_staleness: int) -> None:
    sections: dict[str, Any] = {
        "train": {"steps": STEPS[max_staleness], "group_size": 2, "max_staleness": max_staleness},
        "checkpoint": {"every": 1},
    }
    go_on(trainer(folder, half_a, Sums(), resume=resume, **sections))


def child_of(folder: Path, training: Callable[..., None]) -> int:
    """Train in a process of its own, from the start or, if it had begun, on."""
    pid = os.fork()
    if pid == 0:
        try:
            training(folder, resume=(folder / "run" / "config.toml").exists())
            os._exit(0)
        except BaseException:
            import traceback

            (folder / "error.txt").write_text(traceback.format_exc())
            os._exit(1)
    return pid


def small_run(folder: Path, *, resume: bool) -> None:
    """On a real model, with the torch learner and the local sampler."""
    changes = [*TWO_ENVS, "train.steps=40", "eval.every=0", "checkpoint.keep=2", "trackers=[]"]
    train(load_config(EXAMPLE, [f"run_dir={folder / 'run'}", *changes]), resume=resume)


def consistent(run: Path) -> None:
    """Every checkpoint loads; what it covers is in the lines once and in order."""
    for step, folder in list_checkpoints(run):
        learner = RecordingLearner()
        learner.load(folder)
        assert learner.version == step
    saved = max((step for step, _ in list_checkpoints(run)), default=0)
    steps = [line["step"] for line in read_lines(run / "metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= saved
    trained = [line for line in read_lines(run / "episodes.jsonl") if line["kind"] == "train" and line["step"] <= saved]
    assert len({line["episode_id"] for line in trained}) == len(trained) == saved * 4


def facts(run: Path) -> Any:
    kept = ("step", "learner/loss", "reward/mean")
    metrics = [{key: line[key] for key in kept if key in line} for line in read_lines(run / "metrics.jsonl")]
    return metrics, read_lines(run / "episodes.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_run_that_is_killed_again_and_again_ends_like_one_that_is_not(tmp_path: Path, max_staleness: int) -> None:
    training = partial(long_run, max_staleness=max_staleness)
    pid = child_of(tmp_path, training)
    moments, kills, ended = random.Random(0), 0, None
    while ended is None:
        if kills < KILLS[max_staleness]:
            time.sleep(moments.uniform(0.0, 0.1))
            os.kill(pid, signal.SIGKILL)
        _, code = os.waitpid(pid, 0)
        if os.WIFSIGNALED(code):
            kills += 1
            consistent(tmp_path / "run")
            pid = child_of(tmp_path, training)
        else:
            ended = os.waitstatus_to_exitcode(code)
    assert ended == 0, (tmp_path / "error.txt").read_text()
    assert kills == KILLS[max_staleness], f"only {kills} kills before its end"
    consistent(tmp_path / "run")
    if max_staleness == 0:
        (tmp_path / "whole").mkdir()
        long_run(tmp_path / "whole", resume=False, max_staleness=0)
        assert facts(tmp_path / "run") == facts(tmp_path / "whole" / "run")


@pytest.mark.slow
@pytest.mark.long
def test_a_real_model_that_is_killed_again_and_again_ends_bit_equal(tmp_path: Path) -> None:
    lines, moments = tmp_path / "run" / "metrics.jsonl", random.Random(0)
    for kill in range(8):
        seen, more = len(read_lines(lines)), moments.randint(1, 2)
        pid = child_of(tmp_path, small_run)
        while len(read_lines(lines)) == seen or read_lines(lines)[-1]["step"] < seen + more:
            assert os.waitpid(pid, os.WNOHANG) == (0, 0), "it has ended; error.txt may say why"
            time.sleep(0.01)
        if not kill:
            with pytest.raises(RunFolderError, match=f"is being written by process {pid} on"):
                small_run(tmp_path, resume=True)
        time.sleep(moments.uniform(0.0, 0.3))
        os.kill(pid, signal.SIGKILL)
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL, "it came to its end between the kills"
    small_run(tmp_path, resume=True)
    (tmp_path / "whole").mkdir()
    small_run(tmp_path / "whole", resume=False)
    assert results(tmp_path / "run") == results(tmp_path / "whole" / "run")
    one, other = weights(tmp_path / "run", 40), weights(tmp_path / "whole" / "run", 40)
    assert all(one[name].equal(other[name]) for name in one)
