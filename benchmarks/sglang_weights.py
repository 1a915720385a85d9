"""Seconds and GB/s of weight updates of an SGLang server, by each way that weights travel; and what colocation costs.

Random models of Qwen3's shape whose weights lie on the first GPU (without one: in memory), as a learner's do. Before
each update all of them change. The first update, in which groups are made and kernels load, is apart. `sending` is the
part of an update in which weights travel; the rest is the pause and the copy that is kept for servers that come back.
After the last one the server's checksums are compared with what was sent. "broadcast" needs a second GPU, for the
server.

    python benchmarks/sglang_weights.py --write
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import torch
from sglang_kit import finish, machine, make_sampler, parser, read_weights
from shapes import DEVICE, GPU, SHAPES, build_model

from relax_gym.errors import SamplerError
from relax_gym.sampler import SamplingParams
from relax_gym_plugins.samplers.sglang.sampler import SGLangSampler
from relax_gym_plugins.samplers.sglang.weights.checksums import Checked

WAYS = ("disk", "ipc", "broadcast")
Tensors = dict[str, torch.Tensor]


async def seconds(work: Awaitable[Any]) -> float:
    """How long it takes."""
    start = time.perf_counter()
    await work
    return time.perf_counter() - start


class Clock:
    """Times the sending within updates of a sampler."""

    def __init__(self, sampler: SGLangSampler) -> None:
        self.seconds: list[float] = []
        self._send = sampler._sender.send
        sampler._sender.send = self.send  # type: ignore[method-assign]

    async def send(self, *args: Any, **options: Any) -> Any:
        """In place of the sender's own."""
        start = time.perf_counter()
        try:
            return await self._send(*args, **options)
        finally:
            self.seconds.append(time.perf_counter() - start)


def change(weights: Tensors) -> None:
    """Other numbers in every tensor."""
    for tensor in weights.values():
        tensor.mul_(1.01)
    if GPU:
        torch.cuda.synchronize()


async def checksums(sampler: SGLangSampler, weights: Tensors, dtype: torch.dtype) -> str:
    """Whether the server holds what was sent, and why not."""
    engine = sampler.fleet.members[0].engine
    checked = Checked(weights.items(), dtype, gpu=GPU)
    for _ in checked:
        pass
    failed = await checked.verify([engine])
    return str(next(iter(failed.values()))) if failed else "equal"


async def updates(model: Path, folder: Path, way: str, args: argparse.Namespace) -> dict[str, Any]:
    """One way: the first update and the others."""
    devices = ("1",) if GPU and way == "broadcast" else ()
    sampler = make_sampler(model, folder, args, {}, sync=way, devices=devices)
    clock, weights, times = Clock(sampler), read_weights(model), []
    try:
        await sampler.start()
        for version in range(args.repeats + 1):
            change(weights)
            times.append(await seconds(sampler.update_weights(weights.items(), version)))
        out = await sampler.open_session().generate([1, 2, 3], SamplingParams(max_new_tokens=4))
        if set(out.versions) != {args.repeats}:
            raise SystemExit(f"tokens are of versions {set(out.versions)}, not {args.repeats}")
        sums = await checksums(sampler, weights, getattr(torch, args.dtype))
    finally:
        await sampler.aclose()
    size, sending = sum(tensor.nbytes for tensor in weights.values()), clock.seconds
    return {
        "way": way,
        "gb": size / 1e9,
        "first_seconds": times[0],
        "seconds": times[1:],
        "sending_seconds": sending[1:],
        "median_seconds": statistics.median(times[1:]),
        "median_sending_seconds": statistics.median(sending[1:]),
        "gb_per_second": size / 1e9 / statistics.median(times[1:]),
        "sending_gb_per_second": size / 1e9 / statistics.median(sending[1:]),
        "checksums": sums,
    }


def used() -> float | None:
    """GB in use on the first GPU, by all processes."""
    if not GPU:
        return None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(0)
    return (total - free) / 1e9


async def colocation(model: Path, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Memory of the first GPU, the weights to send included, and seconds of release, restore and an update with it."""
    memory_saver = {} if GPU else {"enable_memory_saver": False}  # a CPU has none; the server answers all the same
    sampler = make_sampler(model, folder, args, memory_saver, sync="ipc", colocate=True)
    weights, rows = read_weights(model), []
    try:
        await sampler.start()
        await sampler.update_weights(weights.items(), 0)
        engine = sampler.fleet.members[0].engine
        for version in range(1, args.repeats + 1):
            row: dict[str, Any] = {"gb_serving": used(), "release_seconds": await seconds(sampler.rest())}
            row["gb_released"] = used()
            for tag in ("weights", "kv_cache"):
                row[f"restore_{tag}_seconds"] = await seconds(engine.restore(tag))
            await sampler.rest()  # an update begins with what is released
            row["update_seconds"] = await seconds(sampler.update_weights(weights.items(), version))
            row["gb_after"] = used()
            rows.append(row)
        await sampler.open_session().generate([1, 2, 3], SamplingParams(max_new_tokens=4))
    finally:
        await sampler.aclose()
    return {name: None if rows[0][name] is None else statistics.median(row[name] for row in rows) for name in rows[0]}


def show_update(size: str, row: dict[str, Any]) -> None:
    """One line of the table."""
    speeds = f"{row['gb_per_second']:.1f} | {row['sending_gb_per_second']:.1f}"
    times = f"{row['first_seconds']:.2f} | {row['median_seconds']:.3f} | {row['median_sending_seconds']:.3f}"
    print(f"| {size} | {row['way']} | {row['gb']:.2f} | {times} | {speeds} | {row['checksums']} |", flush=True)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All sizes and ways, and colocation of each size."""
    print("| model | way | GB | first, s | seconds | of them sending | GB/s | sending, GB/s | checksums |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---|")
    models: list[dict[str, Any]] = []
    for size in args.sizes:
        found: dict[str, Any] = {"model": size, "ways": []}
        with tempfile.TemporaryDirectory() as folder:
            model = build_model(size, Path(folder) / "model", getattr(torch, args.dtype))
            for way in args.ways:
                if way == "broadcast" and torch.cuda.device_count() == 1:
                    print(f"| {size} | broadcast | left out: it needs two GPUs and there is one |", flush=True)
                    continue
                found["ways"].append(asyncio.run(updates(model, Path(folder) / way, way, args)))
                show_update(size, found["ways"][-1])
            if not args.no_colocation:
                try:
                    found["colocation"] = asyncio.run(colocation(model, Path(folder) / "colocated", args))
                except SamplerError as error:  # without the memory saver, the rest is still worth having
                    found["colocation"] = str(error)
        models.append(found)
    return models


def main() -> None:
    """Measure, print and, when asked, write."""
    made = parser(__doc__)
    made.add_argument("--sizes", nargs="+", default=["0.6b", "4b"], choices=SHAPES)
    made.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    made.add_argument("--repeats", type=int, default=5, help="updates after the first")
    made.add_argument("--no-colocation", action="store_true", help="leave release and restore out")
    args = made.parse_args()
    models = measure(args)
    for found in models:
        print(f"\n{found['model']}, colocated:", found.get("colocation"))
    finish({**machine(args, args.server_args), "weights_on": DEVICE, "models": models}, "sglang_weights", args)


if __name__ == "__main__":
    main()
