"""Does training on stale tokens learn as much? Guess-the-number with each bound on the staleness, over seeds.

    python benchmarks/async_learning.py --write

A smaller examples/tiny_guess.toml: numbers from 1 to 7 and three guesses, so that the best is 1. The runs of one seed
begin with the same weights, those of its warm-up. With --write, results/async_learning.json is written after each run,
and what it has with the same options is not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from machine import describe

from relax_gym.config import RunConfig, load_config
from relax_gym.run_folder import list_checkpoints, read_lines
from relax_gym.train import train

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks/results/async_learning.json"
SEEDS = (0, 1, 2)
KINDS: tuple[tuple[int, float | None], ...] = ((0, None), (1, None), (4, None), (4, 3.0))
"""max_staleness and the algorithm's dual_clip, which changes nothing where all is on-policy."""
OPTIONS = {
    "threads": 1,
    "train.groups_per_step": 8,
    "train.steps": 40,
    "eval.every": 10,
    "eval.episodes": 200,
    "trackers": [],
    "timeline.max_mib": 0,
}
ENV = {"low": 1, "high": 7, "max_guesses": 3, "style": "terse"}
WARMUP = {"warmup.steps": 80, "train.steps": 1, "learner.lr": 1e-12, "eval.episodes": 0, "eval.every": 0}
"""Its checkpoint is that of the warm-up, as the only step moves nothing."""
OF_STEPS = {
    "lag": "staleness/mean",
    "clip_fraction": "learner/clip_fraction",
    "logprob_diff": "learner/logprob_diff_mean",
}
"""Means over the steps that say how far the policy is from what sampled."""


def configured(folder: Path, seed: int, changes: Mapping[str, Any]) -> RunConfig:
    """The example with these options."""
    options = {**OPTIONS, "run_dir": str(folder), "seed": seed, **changes}
    config = load_config(ROOT / "examples/tiny_guess.toml", [f"{key}={json.dumps(v)}" for key, v in options.items()])
    return config.model_copy(update={"env": (config.env[0].model_copy(update={"kwargs": ENV}),)})


def warm_up(folder: Path, seed: int) -> Path:
    """The model that the runs of a seed begin with."""
    train(configured(folder, seed, WARMUP))
    return list_checkpoints(folder)[-1][1]


def learn(folder: Path, *, model: Path, bound: int, dual_clip: float | None, seed: int) -> dict[str, Any]:
    """One run: its held-out reward by step, that of its training episodes, and the means of `OF_STEPS`."""
    started = time.perf_counter()
    changes = {} if dual_clip is None else {"algorithm.dual_clip": dual_clip}
    config = configured(folder, seed, {"model.name": str(model), "train.max_staleness": bound, **changes})
    train(config.model_copy(update={"warmup": None}))
    lines = read_lines(folder / "metrics.jsonl")
    taken = [line for line in lines if "staleness/max" in line]
    assert max(line["staleness/max"] for line in taken) <= bound
    return {
        "max_staleness": bound,
        "dual_clip": dual_clip,
        "seed": seed,
        "held_out": {line["step"]: round(line["eval/reward"], 4) for line in lines if "eval/reward" in line},
        "sampled": [round(line["reward/mean"], 3) for line in taken],
        **{name: round(statistics.fmean(line[key] for line in taken), 5) for name, key in OF_STEPS.items()},
        "wall_seconds": round(time.perf_counter() - started, 1),
    }


def kind_of(run: dict[str, Any]) -> tuple[int, float | None]:
    return run["max_staleness"], run["dual_clip"]


def summary(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each kind: mean and standard deviation of the held-out reward over the seeds, after training and before."""
    rows = []
    for kind in KINDS:
        own = [run for run in runs if kind_of(run) == kind]
        if not own:
            continue
        before, after = ([list(run["held_out"].values())[at] for run in own] for at in (0, -1))
        rows.append(
            {
                "max_staleness": kind[0],
                "dual_clip": kind[1],
                "seeds": len(own),
                "before": round(statistics.fmean(before), 4),
                "after": round(statistics.fmean(after), 4),
                "spread": round(statistics.stdev(after), 4) if len(after) > 1 else 0.0,
                **{name: round(statistics.fmean(run[name] for run in own), 4) for name in OF_STEPS},
            }
        )
    return rows


def kept(path: Path | None) -> list[dict[str, Any]]:
    """The runs that a file has already, if they had these options."""
    found = json.loads(path.read_text()) if path is not None and path.exists() else {}
    same = found.get("options") == OPTIONS and found.get("env") == ENV
    return list(found["runs"]) if same else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--write", type=Path, nargs="?", const=RESULT, help="default: %(const)s")
    arguments = parser.parse_args()
    logging.disable(logging.INFO)
    runs = kept(arguments.write)
    done = {(*kind_of(run), run["seed"]) for run in runs}
    with tempfile.TemporaryDirectory() as temporary:
        models: dict[int, Path] = {}
        for seed, (bound, clip) in itertools.product(arguments.seeds, KINDS):
            if (bound, clip, seed) in done:
                continue
            if seed not in models:
                models[seed] = warm_up(Path(temporary) / f"warmup-{seed}", seed)
            folder = Path(temporary) / f"{bound}-{clip}-{seed}"
            runs.append(learn(folder, model=models[seed], bound=bound, dual_clip=clip, seed=seed))
            print({key: value for key, value in runs[-1].items() if key != "sampled"}, flush=True)
            if arguments.write:
                result = {**describe(), "options": OPTIONS, "env": ENV, "summary": summary(runs), "runs": runs}
                arguments.write.write_text(json.dumps(result, indent=2) + "\n")
    for row in summary(runs):
        print(row)


if __name__ == "__main__":
    main()
