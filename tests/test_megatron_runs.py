"""The Megatron learner as the trainer has it, with ranks in processes of their own: whole runs, and ranks that end."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from learner_cases import context, random_batch, save_model
from megatron_learner_kit import MODELS, OPTIONS
from test_megatron_ranks import alive

from relax_gym.config import load_config
from relax_gym.errors import TrainingError
from relax_gym.lines import read_lines
from relax_gym.train import train
from relax_gym_trainers.megatron_learner.learner import MegatronLearner
from relax_gym_trainers.megatron_learner.options import MegatronLearnerOptions

pytestmark = pytest.mark.slow

EXAMPLE = str(Path(__file__).parent.parent / "examples" / "tiny_guess.toml")
SHORT = [
    "threads=1",
    "warmup.steps=25",
    "train.steps=4",
    "train.groups_per_step=4",
    "train.group_size=4",
    "eval.episodes=8",
    "eval.every=2",
    "algorithm.kl_coef=0.01",
    "learner.updates_per_step=2",
]


def run(folder: Path, *overrides: str) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """The metrics of a run, and the tokens of all turns of all episodes."""
    train(load_config(EXAMPLE, [f"run_dir={folder}", *SHORT, *overrides]))
    turns = [turn for episode in read_lines(folder / "episodes.jsonl") for turn in episode["turns"]]
    return read_lines(folder / "metrics.jsonl"), [turn["context_ids"] + turn["token_ids"] for turn in turns]


@pytest.mark.parametrize("both", [[], ["learner.updates_per_step=1", "learner.stream=true"]], ids=["whole", "streamed"])
def test_a_run_on_two_ranks_is_that_of_the_torch_learner(tmp_path: Path, both: list[str]) -> None:
    expected, played = run(tmp_path / "torch", *both)
    found, replayed = run(tmp_path / "megatron", "learner.name=megatron", "learner.tp=2", *both)
    own = ("time/", "perf/", "seconds", "padded_tokens", "prefix_saved_tokens", "streamed_tokens")
    assert any(line.get("learner/streamed_tokens") for line in found) == bool(both)
    assert replayed == played  # the samplers' weights are so near that all draw the same tokens
    assert [set(line) for line in found] == [set(line) for line in expected]
    for ours, theirs in zip(found, expected, strict=True):
        compared = {name: value for name, value in theirs.items() if not any(part in name for part in own)}
        assert {name: ours[name] for name in compared} == pytest.approx(compared, rel=1e-3, abs=1e-5)


def start(folder: Path, **options: Any) -> tuple[MegatronLearner, int]:
    """A learner on two ranks, and the process of the second."""
    options = {**OPTIONS, "tp": 2, **options}
    trainer = MegatronLearner(context(save_model(folder, MODELS["dense"])), MegatronLearnerOptions(**options))
    (other,) = trainer._ranks._others
    assert other._process is not None
    return trainer, other._process.pid


@pytest.mark.parametrize(
    ("number", "timeout", "message"),
    [
        (signal.SIGKILL, 600, r"in step, rank 1 of 2 was ended by SIGKILL \(often the machine running out of memory\)"),
        (signal.SIGSTOP, 8, r"in step, ranks? (0, )?1 of 2 did not come back within 8 s"),
    ],
    ids=["dies", "hangs"],
)
def test_k110_a_rank_that_ends_or_hangs_during_a_step_is_named(
    tmp_path: Path, number: int, timeout: float, message: str
) -> None:
    trainer, child = start(tmp_path, timeout=timeout)
    trainer.step(random_batch())
    threading.Timer(0.2, os.kill, (child, number)).start()
    started = time.monotonic()
    with pytest.raises(TrainingError, match=message + "; all ranks have been ended. The run can go on"):
        for _ in range(1000):
            trainer.step(random_batch())
    assert time.monotonic() - started < 60
    assert not alive(child)
    with pytest.raises(TrainingError, match="step cannot be called: the ranks have ended: in step, rank"):
        trainer.step(random_batch())
    trainer.close()
