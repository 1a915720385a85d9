"""Runs an example on several seeds as a user would, one process each, and records how its held-out score rose.

    python benchmarks/learning.py quickstart --seeds 0 1 2 --write

Writes benchmarks/results/learning_<example>.json and docs/<example>.png.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import describe

from relax_gym.lines import read_lines

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.toml"))


def run(example: str, seed: int, folder: Path) -> dict[str, Any]:
    """One training: wall seconds of the whole command, peak memory in GB, held-out reward and accuracy by step."""
    command = [sys.executable, "-m", "relax_gym", "train", f"examples/{example}.toml"]
    command += ["--set", f"seed={seed}", "--set", f"run_dir={folder}"]
    start = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} failed with status {status}")
    lines = read_lines(folder / "metrics.jsonl")
    return {
        "seed": seed,
        "wall_seconds": round(time.perf_counter() - start, 1),
        "peak_memory_gb": round(usage.ru_maxrss * 1024 / 1e9, 2),
        "held_out": {line["step"]: round(line["eval/reward"], 3) for line in lines if "eval/reward" in line},
        "accuracy": {line["step"]: round(line["eval/accuracy"], 3) for line in lines if "eval/accuracy" in line},
        "sampled": [round(line["reward/mean"], 3) for line in lines if "reward/mean" in line],
    }


def rise(by_step: dict[int, float]) -> float:
    """The score after training minus the one before."""
    first, *_, last = by_step.values()
    return last - first


def draw(runs: list[dict[str, Any]], picture: Path) -> None:
    """All seeds in one figure: sampled training reward thin, held-out reward bold."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, one in enumerate(runs):
        colour = f"C{number}"
        axes.plot(range(1, len(one["sampled"]) + 1), one["sampled"], color=colour, alpha=0.35, linewidth=1)
        steps, rewards = zip(*one["held_out"].items(), strict=True)
        axes.plot(steps, rewards, color=colour, marker="o", linewidth=2, label=f"held out, seed {one['seed']}")
    axes.set_xlabel("training steps")
    axes.set_ylabel("mean reward (thin: sampled in training)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("example", choices=EXAMPLES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = [run(arguments.example, seed, Path(folder) / str(seed)) for seed in arguments.seeds]
    for one in runs:
        print(one["seed"], f"{one['wall_seconds']} s", f"{one['peak_memory_gb']} GB", one["held_out"], one["accuracy"])
    rises = {score: round(statistics.median(rise(one[score]) for one in runs), 3) for score in ("held_out", "accuracy")}
    print(f"median rise of the held-out reward {rises['held_out']}, of the accuracy {rises['accuracy']}")
    if arguments.write:
        result = {**describe(), "median_rise": rises, "runs": runs}
        (ROOT / f"benchmarks/results/learning_{arguments.example}.json").write_text(json.dumps(result, indent=2) + "\n")
        draw(runs, ROOT / f"docs/{arguments.example}.png")


if __name__ == "__main__":
    main()
