"""Whole runs on a real (tiny) model: learning, reproducibility, and going on after a kill."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from relax_gym.config import RunConfig, load_config
from relax_gym.lines import read_lines
from relax_gym.train import RunResult, train

EXAMPLE = str(Path(__file__).parent.parent / "examples" / "tiny_guess.toml")
SHORT = [
    "warmup.steps=25",
    "train.groups_per_step=3",
    "train.group_size=4",
    "eval.episodes=4",
    "eval.every=2",
    "checkpoint.every=2",
    "train.steps=6",
]
MEASURED = ("time/", "perf/")


def config(run_dir: Path, *overrides: str) -> RunConfig:
    return load_config(EXAMPLE, [f"run_dir={run_dir}", "threads=1", *overrides])


def run(run_dir: Path, *overrides: str, resume: bool = False) -> RunResult:
    return train(config(run_dir, *overrides), resume=resume)


def results(run_dir: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Metrics without measured times, and episodes."""
    metrics = [
        {key: value for key, value in line.items() if not key.startswith(MEASURED) and "seconds" not in key}
        for line in read_lines(run_dir / "metrics.jsonl")
    ]
    return metrics, read_lines(run_dir / "episodes.jsonl")


def weights(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(run_dir / "checkpoints" / f"step-{step:06d}" / "model.safetensors")


def test_two_runs_with_one_seed_are_identical_and_another_seed_is_not(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run(tmp_path / name, *SHORT, f"seed={seed}")
    assert results(tmp_path / "a") == results(tmp_path / "b")
    assert results(tmp_path / "a") != results(tmp_path / "c")
    assert len(results(tmp_path / "a")[1]) == 4 * 4 + 6 * 12


def test_k113_k_steps_and_a_kill_and_the_rest_equal_one_run(tmp_path: Path) -> None:
    run(tmp_path / "whole", *SHORT)
    script = (
        "import sys, os, signal\n"
        "from relax_gym.config import load_config\n"
        "from relax_gym.plugins import plugins\n"
        "from relax_gym.train import train\n"
        "from relax_gym import hookimpl\n"
        "class Kill:\n"
        "    @hookimpl\n"
        "    def on_step_end(self, step, metrics):\n"
        "        if step == 3: os.kill(os.getpid(), signal.SIGKILL)\n"
        "plugins().manager.register(Kill())\n"
        "train(load_config(sys.argv[1], sys.argv[2:]))\n"
    )
    arguments = [EXAMPLE, f"run_dir={tmp_path / 'killed'}", "threads=1", *SHORT]
    killed = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert [line["step"] for line in read_lines(tmp_path / "killed" / "metrics.jsonl")] == [0, 1, 2, 3]

    run(tmp_path / "killed", *SHORT, resume=True)
    assert results(tmp_path / "killed") == results(tmp_path / "whole")
    one, other = weights(tmp_path / "whole", 6), weights(tmp_path / "killed", 6)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_finished_run_can_be_given_more_steps(tmp_path: Path) -> None:
    run(tmp_path / "run", *SHORT, "train.steps=2")
    result = run(tmp_path / "run", *SHORT, "train.steps=4", resume=True)
    assert [line["step"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")] == [0, 1, 2, 3, 4]
    assert [step for step, _ in result.evaluations] == [4]


def test_stale_rollouts_overlap_training_within_the_bound(tmp_path: Path) -> None:
    run(tmp_path / "run", *SHORT, "train.max_staleness=2", "eval.episodes=0")
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert max(line["staleness/max"] for line in lines) <= 2


def test_the_checkpoint_is_a_model_transformers_loads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run(tmp_path / "run", *SHORT, "train.steps=2")
    folder = tmp_path / "run" / "checkpoints" / "step-000002"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    episode = next(e for e in read_lines(tmp_path / "run" / "episodes.jsonl") if e["kind"] == "eval" and e["step"] == 2)
    turn = episode["turns"][0]
    ids = torch.tensor([turn["context_ids"] + turn["token_ids"]])
    with torch.no_grad():
        logprobs = model(ids).logits[0].float().log_softmax(-1)
    said = range(len(turn["context_ids"]), ids.shape[1])
    recomputed = [float(logprobs[at - 1, ids[0, at]]) for at in said]
    assert recomputed == pytest.approx(turn["logprobs"], abs=1e-4)
    assert tokenizer.decode(turn["token_ids"], skip_special_tokens=True).startswith(turn["action"])


def test_interrupting_a_run_ends_it_and_keeps_what_was_finished(tmp_path: Path) -> None:
    arguments = ["train", EXAMPLE, "--set", f"run_dir={tmp_path / 'run'}", "--set", "train.steps=5000"]
    for override in [*SHORT[:5], "threads=1"]:
        arguments += ["--set", override]
    process = subprocess.Popen(
        [sys.executable, "-m", "relax_gym", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    for _ in range(1200):
        if len(read_lines(metrics)) >= 3 or process.poll() is not None:
            break
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "--resume" in err
    steps = [line["step"] for line in read_lines(metrics)]
    assert steps[:3] == [0, 1, 2]
    trained = {e["step"] for e in read_lines(tmp_path / "run" / "episodes.jsonl") if e["kind"] == "train"}
    assert trained >= set(steps[1:])
    assert (tmp_path / "run" / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["seed"] == 0
