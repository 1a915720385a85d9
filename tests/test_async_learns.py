"""What is trained ahead of its weights: it knows the policy that sampled it, and learns as much."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_end_to_end import SHORT, run
from transformers import AutoModelForCausalLM

from relax_gym.lines import read_lines
from relax_gym.run_folder import list_checkpoints


def spoken(episode: dict[str, Any]) -> tuple[list[int], dict[int, tuple[float, int]]]:
    """All ids of an episode, and the log-prob and version of those that were sampled, by position."""
    ids: list[int] = []
    sampled: dict[int, tuple[float, int]] = {}
    for turn in episode["turns"]:
        start = len(ids) + len(turn["context_ids"])
        sampled |= dict(enumerate(zip(turn["logprobs"], turn["versions"], strict=True), start))
        ids += turn["context_ids"] + turn["token_ids"]
    return ids, sampled


@pytest.mark.slow
def test_the_log_probs_of_stale_tokens_are_those_of_the_version_that_they_name(tmp_path: Path) -> None:
    """Also within an episode whose weights changed in flight: the ratio of the loss is taken against them."""
    changes = ["train.max_staleness=2", "train.steps=6", "checkpoint.every=1", "checkpoint.keep=99", "eval.every=0"]
    run(tmp_path / "run", *SHORT, *changes, "learner.lr=2e-3")
    assert max(line.get("staleness/max", 0) for line in read_lines(tmp_path / "run" / "metrics.jsonl")) > 0
    trained = [line for line in read_lines(tmp_path / "run" / "episodes.jsonl") if line["kind"] == "train"]
    policies = {
        step: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for step, folder in list_checkpoints(tmp_path / "run")
    }
    gaps: dict[int, list[float]] = {0: [], 1: []}  # to the version itself and to the next
    for ids, sampled in map(spoken, trained):
        for version in {version for _, version in sampled.values()} & policies.keys():
            for later in gaps:
                with torch.inference_mode():
                    logits = policies[version + later](torch.tensor([ids])).logits[0]
                found = logits.log_softmax(-1)
                for at, (logprob, of) in sampled.items():
                    if of == version:
                        gaps[later].append(abs(found[at - 1, ids[at]].item() - logprob))
    assert len(gaps[0]) > 100
    assert max(gaps[0]) < 1e-4
    assert max(gaps[1]) > 1e-2  # the test can tell one version from the next


BENCHMARK = Path(__file__).parent.parent / "benchmarks" / "async_learning.py"


@pytest.mark.slow
@pytest.mark.long
def test_the_final_reward_is_the_same_for_each_bound_within_seed_noise(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(BENCHMARK), "--write", str(tmp_path / "result.json")], check=True)
    result = json.loads((tmp_path / "result.json").read_text())
    rows = [row for row in result["summary"] if row["max_staleness"] < 4 or row["dual_clip"]]
    assert [(row["max_staleness"], row["seeds"]) for row in rows] == [(0, 3), (1, 3), (4, 3)]
    assert all(row["after"] - row["before"] > 0.2 for row in rows)
    noise = max(0.02, *(row["spread"] for row in rows))  # of 200 episodes: 0.02 by themselves
    rewards = [row["after"] for row in rows]
    assert max(rewards) - min(rewards) <= 2 * noise, rows
