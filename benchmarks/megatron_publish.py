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
from megatron_step import Case, make_learner
from shapes import GPU, build_model
from torch import Tensor

from relax_gym.sampler import Weights
from relax_gym_trainers.megatron_learner import learner as front

SIZE = "4b" if GPU else "0.2b"
BUCKET_BYTES = 1 << 28 if GPU else 1 << 25
LIMIT = 600.0
RESULTS = Path(__file__).parent / "results" / f"megatron_publish_{'gpu' if GPU else 'cpu'}.json"


def build(folder: Path) -> front.MegatronLearner:
    """Two ranks, and random weights on them."""
    dtype = "bfloat16" if GPU else "float32"
    model = build_model(SIZE, folder / "model", getattr(torch, dtype))
    layout, unused = {"tp": 2}, {"rows": 2, "prompt": 1, "completion": 1, "at_once": 1024}
    case = Case(learner="megatron", size=SIZE, dtype=dtype, layout=layout, **unused)
    learner: front.MegatronLearner = make_learner(case, model, folder, limit=LIMIT)
    return learner


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
        head = {**describe(), "megatron-core": installed("megatron-core"), "size": SIZE}
        RESULTS.write_text(json.dumps({**head, "result": result}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
