"""For how long a checkpoint of the Megatron learner holds a step up, and how fast it is written, read and exported.

Random weights after one step, so that there are moments. State and model folder are saved with one layout and loaded
with another. *Held up* is until training goes on, *written* until all ranks have the bytes on the disk (fsync); a save
that blocked would hold the step up for as long. `step_while_writing` is a step right after a save beside one with
nothing else to do. What is loaded and exported from the disk is in the page cache if it fits there.

    python benchmarks/megatron_checkpoint.py --size 0.2b --write
"""

from __future__ import annotations

import argparse
import functools
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import describe, installed
from megatron_step import Case, make_batch, make_learner
from shapes import GPU, SHAPES, build_model

from relax_gym_trainers.megatron_learner.checkpoint_export import export_checkpoint

RESULTS = Path(__file__).parent / "results" / f"megatron_checkpoint_{'gpu' if GPU else 'cpu'}.json"
LIMIT = 600.0


def seconds(act: Callable[[], Any]) -> float:
    """That it takes."""
    start = time.perf_counter()
    act()
    if GPU:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def gigabytes(folder: Path) -> float:
    """Of all files in it."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e9


def save(learner: Any, step: Callable[[], Any], state: Path) -> dict[str, float]:
    """One save that waits for nothing, then one with a step in the middle; the second is kept."""
    found = {}
    for way in ("alone", "with_step"):
        shutil.rmtree(state, ignore_errors=True)
        start, finish = time.perf_counter(), learner.save_state(state)
        found[f"held_up_{way}"] = time.perf_counter() - start
        if way == "with_step":
            found["step_while_writing"] = seconds(step)
        finish()
        found[f"written_{way}"] = time.perf_counter() - start
    return found


def measure(size: str, layouts: tuple[dict[str, int], dict[str, int]], folder: Path, repeats: int) -> dict[str, Any]:
    """Medians of seconds, rates in GB/s and ratios."""
    dtype = "bfloat16" if GPU else "float32"
    model = build_model(size, folder / "model", getattr(torch, dtype))
    case, other = (
        Case(learner="megatron", size=size, rows=2, prompt=16, completion=16, at_once=64, dtype=dtype, layout=layout)
        for layout in layouts
    )
    state = folder / "state"
    learner = make_learner(case, model, folder, LIMIT)
    step = functools.partial(learner.step, make_batch(case))
    step()
    alone = statistics.median(seconds(step) for _ in range(repeats))
    saves = [save(learner, step, state) for _ in range(repeats)]
    times = {name: statistics.median(one[name] for one in saves) for name in saves[0]}
    times["export_from_ranks"] = seconds(lambda: learner.export(folder / "ranks"))
    learner.close()
    learner = make_learner(other, model, folder, LIMIT)
    times["load"] = statistics.median(seconds(lambda: learner.load(state)) for _ in range(repeats))
    learner.close()
    times["export_from_disk"] = seconds(lambda: export_checkpoint(state, folder / "disk"))
    sizes = {"state": gigabytes(state), "model": gigabytes(folder / "ranks")}
    return {
        "size": size,
        "saved_with": layouts[0],
        "loaded_with": layouts[1],
        "gigabytes": sizes,
        "seconds": times | {"step": alone},
        "gigabytes_per_second": {
            "held_up": sizes["state"] / times["held_up_alone"],
            "written": sizes["state"] / times["written_alone"],
            "load": sizes["state"] / times["load"],
            "export_from_ranks": sizes["model"] / times["export_from_ranks"],
            "export_from_disk": sizes["model"] / times["export_from_disk"],
        },
        "blocking_over_held_up": times["written_alone"] / times["held_up_alone"],
        "step_while_writing_over_step": times["step_while_writing"] / alone,
    }


def layout(text: str) -> dict[str, int]:
    """`tp=2,dp=2`."""
    return {name: int(size) for name, size in (part.split("=") for part in text.split(","))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=sorted(SHAPES), default="0.2b")
    parser.add_argument("--save", type=layout, default={"tp": 2}, help="layout, as tp=2,dp=2")
    parser.add_argument("--load", type=layout, default={"pp": 2})
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: that of temporary files")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--write", action="store_true", help=f"also write {RESULTS.name}")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        result = measure(options.size, (options.save, options.load), Path(folder), options.repeats)
    print(json.dumps(result, indent=2))
    if options.write:
        head = {**describe(), "megatron-core": installed("megatron-core")}
        RESULTS.write_text(json.dumps({**head, "result": result}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
