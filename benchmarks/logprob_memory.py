"""Memory, time and exactness of the chunked log-probs beside the naive way, on a CPU.

Both give the log-prob and the entropy of every token and a gradient for the hidden states and the head's weight. The
naive way is hidden @ W.T, log_softmax in float32, gather, and autograd. The entropy is reported without a gradient, as
without an entropy bonus, so that the naive way need not keep the probabilities; `bonus` rows have its gradient too.
Times are in float32 and, where the CPU multiplies it in hardware, in bfloat16: what the learner's dtype "auto" takes.

    OMP_WAIT_POLICY=passive python benchmarks/logprob_memory.py --write

The variable matters where other programs use the cores too: threads that wait by spinning take time from each other.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from machine import describe
from torch import Tensor

from relax_gym_trainers.torch_learner.logprobs import Head, _HeadLogProbs
from relax_gym_trainers.torch_learner.model import choose_dtype
from relax_gym_trainers.torch_learner.options import TorchLearnerOptions

CHUNK = TorchLearnerOptions().logprob_chunk
MEMORY_SHAPE = {"tokens": 8192, "vocab": 151_936, "hidden": 64}
TIME_SHAPE = {"tokens": 2048, "vocab": 32_000, "hidden": 576}
EXACT_SHAPE = {"tokens": 33, "vocab": 501, "hidden": 16}
NAIVE_COPIES = 3
"""Of [tokens, vocab] in float32 that the naive way holds at once: log-probs, their gradient, the logits' gradient."""
SPARE_BYTES = 3e9
ALLOWED_MEMORY, ALLOWED_TIME, ALLOWED_ERROR = 0.25, 1.1, 1e-12
RESULTS = Path(__file__).parent / "results" / "logprob_memory_cpu.json"
Scored = tuple[Tensor, Tensor]


def chunked(hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, bonus: bool) -> Scored:
    """Log-probs and entropy of the targets, [N] each, as the learner computes them."""
    head = Head(weight=weight, bias=None, scale=1.0, softcap=None, temperature=1.0)
    logprobs, entropy = _HeadLogProbs.apply(hidden, weight, None, targets, head, dtype, CHUNK)
    return logprobs, entropy if bonus else entropy.detach()


def naive(hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, bonus: bool) -> Scored:
    """The same from the logits of all tokens. Lets go of every tensor as early as it can."""
    logits = hidden.to(dtype) @ weight.to(dtype).T
    log_p = logits.to(torch.promote_types(dtype, torch.float32)).log_softmax(-1)
    del logits
    logprobs = log_p.gather(-1, targets[:, None])[:, 0]
    with contextlib.nullcontext() if bonus else torch.no_grad():
        return logprobs, -(log_p.exp() * log_p).sum(-1)


WAYS = {"chunked": chunked, "naive": naive}


def case(tokens: int, vocab: int, hidden: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [N, H], a head's weight [V, H] and targets [N]."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(tokens, hidden, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, hidden, generator=generator, dtype=dtype).mul_(hidden**-0.5).requires_grad_()
    return states, weight, torch.randint(vocab, (tokens,), generator=generator)


def step(way: str, inputs: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype, bonus: bool) -> list[Tensor]:
    """Forward and backward → log-probs, entropy and the gradients of hidden states and weight."""
    hidden, weight, _ = inputs
    hidden.grad = weight.grad = None
    logprobs, entropy = WAYS[way](*inputs, dtype, bonus)
    factors = torch.linspace(-1.0, 1.0, len(logprobs), dtype=logprobs.dtype)
    loss = logprobs @ factors
    (loss + 0.5 * entropy.sum() if bonus else loss).backward()
    assert hidden.grad is not None and weight.grad is not None
    return [logprobs.detach(), entropy.detach(), hidden.grad, weight.grad]


def status_bytes(file: str, field: str) -> int:
    """A field in kB of a file in /proc, in bytes."""
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc", file).read_text(encoding="utf-8"), re.MULTILINE)
    assert found, f"/proc/{file} has no {field}; this benchmark needs Linux"
    return int(found[1]) * 1024


def peak_bytes(way: str, tokens: int) -> int:
    """How far one step rises above what the process held before, the inputs included. Only in a fresh process."""
    step(way, case(8, 64, 8), torch.float32, False)
    inputs = case(**{**MEMORY_SHAPE, "tokens": tokens})
    before = status_bytes("self/status", "VmRSS")
    step(way, inputs, torch.float32, False)
    return status_bytes("self/status", "VmHWM") - before


def measure_memory(threads: int) -> list[dict[str, Any]]:
    """Peaks of both ways at the same number of tokens: 8,192 or, where that does not fit, half as often as needed."""
    tokens = MEMORY_SHAPE["tokens"]
    spare = status_bytes("meminfo", "MemAvailable") - SPARE_BYTES
    while NAIVE_COPIES * 4 * tokens * MEMORY_SHAPE["vocab"] > spare:
        tokens //= 2
    rows = []
    for count in sorted({tokens, MEMORY_SHAPE["tokens"]}):
        peaks = {}
        for way in WAYS if count == tokens else ["chunked"]:
            command = [sys.executable, __file__, "--threads", str(threads), "--peak", way, str(count)]
            peaks[way] = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        naive_bytes = peaks.get("naive")
        row = {**MEMORY_SHAPE, "tokens": count, "chunked_bytes": peaks["chunked"], "naive_bytes": naive_bytes}
        rows.append({**row, "ratio": peaks["chunked"] / naive_bytes if naive_bytes else None})
    return rows


def measure_time(dtype: torch.dtype, bonus: bool, repeats: int) -> dict[str, Any]:
    """Seconds of forward and backward, alternating, after one warm-up of each."""
    inputs = case(**TIME_SHAPE)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for repeat in range(repeats + 1):
        for way in WAYS if repeat % 2 else reversed(WAYS):
            begin = time.perf_counter()
            step(way, inputs, dtype, bonus)
            if repeat:
                seconds[way].append(time.perf_counter() - begin)
    ratio = statistics.median(seconds["chunked"]) / statistics.median(seconds["naive"])
    pairs = [ours / theirs for ours, theirs in zip(seconds["chunked"], seconds["naive"], strict=True)]
    name = str(dtype).removeprefix("torch.")
    return {**TIME_SHAPE, "dtype": name, "bonus": bonus, "seconds": seconds, "ratio": ratio, "ratios": sorted(pairs)}


def measure_error() -> dict[str, float]:
    """Largest absolute difference between the two ways in float64, the entropy's gradient included."""
    inputs = case(**EXACT_SHAPE, dtype=torch.float64)
    ours, theirs = (step(way, inputs, torch.float64, True) for way in WAYS)
    names = ("logprobs", "entropy", "grad_hidden", "grad_weight")
    return {name: float((a - b).abs().max()) for name, a, b in zip(names, ours, theirs, strict=True)}


def show(result: dict[str, Any]) -> None:
    """Print the tables."""
    print("| tokens | chunked, peak MB | naive, peak MB | ratio |\n|---:|---:|---:|---:|")
    for row in result["memory"]:
        naive_mb = f"{row['naive_bytes'] / 1e6:,.0f} | {row['ratio']:.3f}" if row["naive_bytes"] else "does not fit |"
        print(f"| {row['tokens']:,} | {row['chunked_bytes'] / 1e6:,.0f} | {naive_mb} |")
    print("\n| arithmetic | entropy bonus | time, ratio of medians | of pairs, min to max |\n|---|---|---:|---:|")
    for row in result["time"]:
        spread = f"{row['ratios'][0]:.2f} to {row['ratios'][-1]:.2f}"
        print(f"| {row['dtype']} | {'yes' if row['bonus'] else 'no'} | {row['ratio']:.2f} | {spread} |")
    print("\nlargest difference in float64: " + ", ".join(f"{k} {v:.1e}" for k, v in result["error"].items()))


def main() -> None:
    """Measure, print and, when asked, write. The exit code is 1 when a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peak", nargs=2, metavar=("WAY", "TOKENS"), help="only print the peak of one way, in bytes")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.parent.name}/{RESULTS.name}")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.peak:
        print(peak_bytes(arguments.peak[0], int(arguments.peak[1])))
        return
    dtypes = dict.fromkeys([torch.float32, choose_dtype("auto", torch.device("cpu"))])
    kinds = [(dtype, bonus) for dtype in dtypes for bonus in (False, True)]
    result = {
        **describe(),
        "threads": arguments.threads,
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),
        "chunk": CHUNK,
        "memory": measure_memory(arguments.threads),
        "time": [measure_time(dtype, bonus, arguments.repeats) for dtype, bonus in kinds],
        "error": measure_error(),
    }
    show(result)
    if arguments.write:
        RESULTS.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    memory, slow = result["memory"], [row for row in result["time"] if row["ratio"] > ALLOWED_TIME]
    if slow or any((row["ratio"] or 0) > ALLOWED_MEMORY for row in memory):
        raise SystemExit(f"above {ALLOWED_MEMORY:g} of the memory or {ALLOWED_TIME:g} of the time of the naive way")
    if max(result["error"].values()) > ALLOWED_ERROR:
        raise SystemExit(f"differs from the naive way by more than {ALLOWED_ERROR:g} in float64")


if __name__ == "__main__":
    main()
