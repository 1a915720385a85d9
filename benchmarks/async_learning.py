"""Does training on stale tokens learn as much? Guess-the-number with each bound on the staleness, over seeds.

    python benchmarks/async_learning.py --write

A smaller examples/tiny_guess.toml: numbers from 1 to 7 and three guesses, so that the best is 1. The runs of one seed
begin with the same weights, those of its warm-up. With --write, results/async_learning.json is written after each run,
and what it has with the same options is not run again. --set changes options of all runs but the warm-ups.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import re
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from machine import describe

from relax_gym.config import RunConfig, load_config
from relax_gym.lines import read_lines
from relax_gym.run_folder import list_checkpoints
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
    "reward": "reward/mean",
    "grad_norm": "learner/grad_norm",
    "ratio": "learner/ratio_mean",
    "entropy": "learner/entropy",
    "lag": "staleness/mean",
    "clip_fraction": "learner/clip_fraction",
    "logprob_diff": "learner/logprob_diff_mean",
    "logprob_diff_max": "learner/logprob_diff_max",
}
"""What is kept of each step: enough to see why a run lost what it had learned; None where all rewards were equal."""
MEANS = ("lag", "clip_fraction", "logprob_diff")
"""Those whose means over the steps say how far the policy is from what sampled."""


def configured(folder: Path, seed: int, changes: Mapping[str, Any], further: Sequence[str] = ()) -> RunConfig:
    """The example with these options; `further` as on the command line."""
    options = {**OPTIONS, "run_dir": str(folder), "seed": seed, **changes}
    overrides = [f"{key}={json.dumps(value)}" for key, value in options.items()]
    config = load_config(ROOT / "examples/tiny_guess.toml", [*overrides, *further])
    return config.model_copy(update={"env": (config.env[0].model_copy(update={"kwargs": ENV}),)})


def warm_up(folder: Path, seed: int) -> Path:
    """The model that the runs of a seed begin with."""
    train(configured(folder, seed, WARMUP))
    return list_checkpoints(folder)[-1][1]


def learn(
    folder: Path, *, model: Path, bound: int, dual_clip: float | None, seed: int, further: Sequence[str]
) -> dict[str, Any]:
    """One run: its held-out reward by step, and `OF_STEPS` of each step, the first one's first."""
    started = time.perf_counter()
    changes = {} if dual_clip is None else {"algorithm.dual_clip": dual_clip}
    config = configured(folder, seed, {"model.name": str(model), "train.max_staleness": bound, **changes}, further)
    train(config.model_copy(update={"warmup": None}))
    lines = read_lines(folder / "metrics.jsonl")
    taken = [line for line in lines if "staleness/max" in line]
    assert max(line["staleness/max"] for line in taken) <= bound
    return {
        "max_staleness": bound,
        "dual_clip": dual_clip,
        "seed": seed,
        "held_out": {line["step"]: round(line["eval/reward"], 4) for line in lines if "eval/reward" in line},
        "wall_seconds": round(time.perf_counter() - started, 1),
        "steps": {name: [rounded(line.get(key)) for line in taken] for name, key in OF_STEPS.items()},
    }


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def kind_of(run: dict[str, Any]) -> tuple[int, float | None]:
    return run["max_staleness"], run["dual_clip"]


def numbers(runs: Sequence[dict[str, Any]], name: str) -> list[float]:
    """One of `OF_STEPS` in all steps of some runs."""
    return [value for run in runs for value in run["steps"][name] if value is not None]


def largest_fall(rewards: Sequence[float], before: int = 5) -> float:
    """Most that the reward of a step is below the mean of the steps before it; 0.1 is the luck of the numbers."""
    return max(statistics.fmean(rewards[at - before : at]) - rewards[at] for at in range(before, len(rewards)))


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
                **{name: round(statistics.fmean(numbers(own, name)), 4) for name in MEANS},
                "grad_norm_max": max(numbers(own, "grad_norm")),
                "largest_fall": round(max(largest_fall(run["steps"]["reward"]) for run in own), 3),
            }
        )
    return rows


def kept(path: Path | None, further: Sequence[str]) -> list[dict[str, Any]]:
    """The runs that a file has already, if they had these options."""
    found = json.loads(path.read_text()) if path is not None and path.exists() else {}
    same = (found.get("options"), found.get("env"), found.get("set", [])) == (OPTIONS, ENV, list(further))
    return [run for run in found["runs"] if run.get("steps", {}).keys() == OF_STEPS.keys()] if same else []


def written(result: Mapping[str, Any]) -> str:
    """As JSON, a series of numbers in one line."""
    text = json.dumps(result, indent=2)
    return re.sub(r"\[(?:null|[\s\d.,e+-])+\]", lambda found: " ".join(found[0].split()), text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--write", type=Path, nargs="?", const=RESULT, help="default: %(const)s")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="may be given several times")
    arguments = parser.parse_args()
    further: list[str] = arguments.set
    logging.disable(logging.INFO)
    runs = kept(arguments.write, further)
    done = {(*kind_of(run), run["seed"]) for run in runs}
    with tempfile.TemporaryDirectory() as temporary:
        models: dict[int, Path] = {}
        for seed, (bound, clip) in itertools.product(arguments.seeds, KINDS):
            if (bound, clip, seed) in done:
                continue
            if seed not in models:
                models[seed] = warm_up(Path(temporary) / f"warmup-{seed}", seed)
            folder = Path(temporary) / f"{bound}-{clip}-{seed}"
            run = learn(folder, model=models[seed], bound=bound, dual_clip=clip, seed=seed, further=further)
            runs.append(run)
            print({key: value for key, value in run.items() if key != "steps"}, flush=True)
            if arguments.write:
                head = {**describe(), "options": OPTIONS, "env": ENV, **({"set": further} if further else {})}
                arguments.write.write_text(written({**head, "summary": summary(runs), "runs": runs}))
    for row in summary(runs):
        print(row)


if __name__ == "__main__":
    main()
