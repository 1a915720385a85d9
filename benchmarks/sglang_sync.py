"""How long a weight update of SGLang servers takes, by the way the weights travel, and what colocation frees.

The weights lie on the first GPU, as those of a learner do. "broadcast" wants a second one, for the server, and is left
out where there is none. The first update, in which groups are made and kernels compiled, is apart.

    python benchmarks/sglang_sync.py --write
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from machine import describe
from sglang_models import SIZES, make_context, make_model, weights_of

from relax_gym.sampler import SamplingParams
from relax_gym_plugins.samplers.sglang.options import SGLangSamplerOptions
from relax_gym_plugins.samplers.sglang.sampler import SGLangSampler

RESULTS = Path(__file__).parent / "results"


async def measure(folder: Path, way: str, plan: argparse.Namespace) -> dict[str, Any]:
    """Seconds of updates, each checked by checksums, and bytes sent."""
    cuda = torch.cuda.is_available()
    weights = list(weights_of(folder, device="cuda:0" if cuda else "cpu"))
    size = sum(tensor.nbytes for _, tensor in weights)
    sampler = SGLangSampler(
        make_context(folder, folder / "run" / way),
        SGLangSamplerOptions(
            server_args=plan.server_args,
            python=plan.python,
            env=plan.env,
            devices=("1",) if way == "broadcast" and cuda else (),
            sync="ipc" if way == "colocated ipc" else way,
            colocate=way == "colocated ipc",
        ),
    )
    times: list[float] = []
    out: dict[str, Any] = {"way": way, "bytes": size}
    try:
        await sampler.start()
        for version in range(plan.repeats + 1):
            if way == "colocated ipc":
                out |= await _rest(sampler)
            start = time.perf_counter()
            await sampler.update_weights(weights, version)
            times.append(time.perf_counter() - start)
            done = await sampler.open_session().generate([1, 2, 3], SamplingParams(max_new_tokens=4))
            assert done.versions == (version,) * 4
    finally:
        await sampler.aclose()
    first, *rest = times
    median = statistics.median(rest)
    return {**out, "seconds": median, "first": first, "all": rest, "gb_per_second": size / median / 1e9}


async def _rest(sampler: SGLangSampler) -> dict[str, float]:
    before = _free()
    start = time.perf_counter()
    await sampler.rest()
    return {"rest_seconds": time.perf_counter() - start, "freed_gb": (_free() - before) / 1e9}


def _free() -> int:
    return torch.cuda.mem_get_info(0)[0] if torch.cuda.is_available() else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["0.6b", "4b"])
    parser.add_argument("--ways", nargs="+", default=["disk", "ipc", "broadcast", "colocated ipc"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--server-args", type=json.loads, default={}, help="JSON")
    parser.add_argument("--env", type=json.loads, default={}, help="environment of the servers, JSON")
    parser.add_argument("--python", help="interpreter that has SGLang; default: this one")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / "sglang_sync.json")
    return parser.parse_args()


def main() -> None:
    plan = parse()
    rows = []
    print("| model | way | seconds | first | GB/s |\n|---|---|---:|---:|---:|")
    for size in plan.sizes:
        with tempfile.TemporaryDirectory() as name:
            folder = make_model(Path(name), size)
            for way in plan.ways:
                if way == "broadcast" and torch.cuda.device_count() == 1:
                    print(f"| {size} | {way} | needs two GPUs | | |")
                    continue
                row = {"size": size, **asyncio.run(measure(folder, way, plan))}
                print(f"| {size} | {way} | {row['seconds']:.3f} | {row['first']:.2f} | {row['gb_per_second']:.1f} |")
                if "freed_gb" in row:
                    print(f"  freed {row['freed_gb']:.1f} GB in {row['rest_seconds']:.2f} s")
                rows.append(row)
                if plan.write:
                    plan.out.write_text(json.dumps({**describe(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
