"""What gathering the Megatron learner's weights costs, and how much of it is hidden behind sending them.

Two tensor-parallel ranks; whoever takes the weights waits after each bucket for as long as gathering one takes, as for
servers that load it. Beside the learner's own way, each bucket is gathered only when the one before was taken.

    python benchmarks/megatron_publish.py --write
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from machine import describe, installed
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from relax_gym.config import RunConfig
from relax_gym.context import RunContext
from relax_gym.sampler import Weights
from relax_gym.testing import tiny_tokenizer
from relax_gym_trainers.megatron_learner import learner as front
from relax_gym_trainers.megatron_learner.options import MegatronLearnerOptions

GPU = torch.cuda.is_available()
SHAPE = {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36} if GPU else {}
SMALL = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12}
HEADS = {
    "num_attention_heads": 32 if GPU else 12,
    "num_key_value_heads": 8 if GPU else 4,
    "head_dim": 128 if GPU else 64,
}
BUCKET_BYTES = 1 << 28 if GPU else 1 << 25
RESULTS = Path(__file__).parent / "results" / f"megatron_publish_{'gpu' if GPU else 'cpu'}.json"


def build(folder: Path) -> front.MegatronLearner:
    """Random weights of the shape of Qwen3-4B, or of a small model on a CPU."""
    config = Qwen3Config(**{**(SHAPE or SMALL), **HEADS, "vocab_size": 151_936 if GPU else 32_000})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if GPU else torch.float32)
    model.save_pretrained(folder)
    run = RunConfig.model_validate(
        {
            "model": {"name": str(folder)},
            "env": [{"id": "bench/None-v0"}],
            "algorithm": {"name": "grpo"},
            "train": {"steps": 1, "groups_per_step": 1, "group_size": 2},
        }
    )
    context = RunContext(config=run, run_dir=folder, model_path=folder, tokenizer=tiny_tokenizer())
    return front.MegatronLearner(context, MegatronLearnerOptions(tp=2, dtype="bfloat16" if GPU else "float32"))


def one_by_one(learner: front.MegatronLearner) -> Iterator[tuple[str, Tensor]]:
    """As `learner.weights()`, but nothing is gathered ahead."""
    ranks = learner._ranks
    ranks.call("begin_weights")
    while some := ranks.call("next_weights", front.BUCKET_BYTES):
        yield from some


def seconds(weights: Weights, pause: float) -> tuple[float, int]:
    """Until all were taken, with a pause after each bucket; and how many buckets those were."""
    start, filled, buckets = time.perf_counter(), 0, 0
    for _, tensor in weights:
        filled += tensor.nbytes
        if filled >= front.BUCKET_BYTES:
            time.sleep(pause)
            filled, buckets = 0, buckets + 1
    if GPU:
        torch.cuda.synchronize()
    return time.perf_counter() - start, buckets


def measure(learner: front.MegatronLearner, repeats: int) -> dict[str, float]:
    """Medians; the first pass is not counted."""
    seconds(learner.weights(), 0)
    gathers = [seconds(one_by_one(learner), 0) for _ in range(repeats)]
    gather, buckets = statistics.median(time for time, _ in gathers), gathers[0][1]
    pause = gather / (buckets + 1)
    after = statistics.median(seconds(one_by_one(learner), pause)[0] for _ in range(repeats))
    ahead = statistics.median(seconds(learner.weights(), pause)[0] for _ in range(repeats))
    nbytes = sum(tensor.nbytes for _, tensor in learner.weights())
    return {
        "gib": nbytes / 2**30,
        "buckets": buckets + 1,
        "gather_seconds": gather,
        "gib_per_second": nbytes / 2**30 / gather,
        "gather_after_send_seconds": after,
        "gather_during_send_seconds": ahead,
        "hidden": (after - ahead) / gather,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--write", action="store_true", help=f"also write {RESULTS.name}")
    options = parser.parse_args()
    front.BUCKET_BYTES = BUCKET_BYTES
    with tempfile.TemporaryDirectory() as folder:
        learner = build(Path(folder))
        result = measure(learner, options.repeats)
        learner.close()
    for name, value in result.items():
        print(f"{name:28} {value:.3f}")
    if options.write:
        head = {**describe(), "megatron-core": installed("megatron-core")}
        RESULTS.write_text(json.dumps({**head, "result": result}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
