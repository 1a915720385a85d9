"""Whole runs with the Megatron learner that are killed and go on: in the layout they had, and in another."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from command import run
from safetensors.torch import load_file

from relax_gym.config import load_config
from relax_gym.lines import read_lines
from relax_gym.train import train

EXAMPLE = Path(__file__).parent.parent / "examples" / "tiny_guess.toml"
SETTINGS = {
    "threads": 1,
    "learner.name": "megatron",
    "learner.tp": 2,
    "learner.dtype": "float32",
    "learner.checkpoint_model": False,
    "warmup.steps": 25,
    "warmup.episodes_per_step": 16,
    "train.groups_per_step": 2,
    "train.group_size": 4,
    "eval.episodes": 0,
    "checkpoint.every": 1,
    "checkpoint.keep": 2,
    "train.steps": 4,
}
KILLED = """\
import os, signal, sys
from relax_gym import hookimpl
from relax_gym.cli import main
from relax_gym.plugins import plugins
class Kill:
    @hookimpl
    def on_step_end(self, step, metrics):
        if step == 3: os.kill(os.getpid(), signal.SIGKILL)
plugins().manager.register(Kill())
main(sys.argv[1:])
"""


def overrides(run_dir: Path, **changes: Any) -> list[str]:
    values = {"run_dir": run_dir, **SETTINGS, **changes}
    return [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in values.items()]


def results(run_dir: Path) -> list[dict[str, Any]]:
    """Metrics without measured times."""
    return [
        {key: value for key, value in line.items() if not key.startswith(("time/", "perf/")) and "seconds" not in key}
        for line in read_lines(run_dir / "metrics.jsonl")
    ]


@pytest.mark.slow
def test_k113_a_run_killed_while_a_checkpoint_is_written_goes_on(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # sums of several threads differ in their last bits
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    sets = [part for value in overrides(killed) for part in ("--set", value)]
    command = [sys.executable, "-c", KILLED, "train", str(EXAMPLE), *sets]
    dead = subprocess.run(command, capture_output=True, text=True, check=False)
    assert dead.returncode == -signal.SIGKILL, dead.stderr
    found = sorted(path.name for path in (killed / "checkpoints").iterdir())
    assert found == [".unfinished-000002", "step-000001"]  # the second was being written

    train(load_config(str(EXAMPLE), overrides(killed)), resume=True)
    train(load_config(str(EXAMPLE), overrides(whole, **{"train.steps": 5})))
    assert results(killed) == results(whole)[:4]
    assert all(line["learner/updates"] for line in results(whole))
    for folder in (killed, whole):
        code, out, err = run(capsys, "export", folder, tmp_path / f"{folder.name}-model", "--checkpoint", 4)
        assert code == 0, err
        assert out == f"{folder}-model: the model of {folder}/checkpoints/step-000004\n"
    one, other = (load_file(tmp_path / f"{name}-model" / "model.safetensors") for name in ("killed", "whole"))
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
    assert {path.name for path in (killed / "checkpoints").iterdir()} == {"step-000003", "step-000004"}

    train(load_config(str(EXAMPLE), overrides(killed, **{"train.steps": 5, "learner.tp": 1})), resume=True)
    last, expected = results(killed)[-1], results(whole)[-1]
    assert last["step"] == expected["step"] == 5
    assert last["learner/loss"] == pytest.approx(expected["learner/loss"], abs=1e-5)
