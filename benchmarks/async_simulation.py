"""How much asynchronous training saves on a heavy-tailed engine: the real loop, in simulated time.

    python benchmarks/async_simulation.py --write

Engine and learner, both simulated (`relax_gym.testing`), train in lockstep and then asynchronously: first an engine
that has so many places, then one that is slower the more it decodes, as SGLang is on a GPU. Writes
benchmarks/results/async_simulation_cpu.json and, from two of the timelines, docs/async_timeline.png.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from machine import describe
from timelines import draw, learner_spans

import relax_gym
from relax_gym.build import Parts, build_rewards
from relax_gym.chat import ChatRenderer
from relax_gym.config import load_algorithms, parse_config
from relax_gym.context import RunContext
from relax_gym.lines import read_lines
from relax_gym.run_folder import RunFolder
from relax_gym.tasks import TaskSource
from relax_gym.testing import SimulatedEngine, SimulatedLearner, SimulatedLoop, heavy_tailed, tiny_tokenizer
from relax_gym.train import Trainer

ROOT = Path(__file__).parent.parent


class Answer(relax_gym.Env):
    """So many turns."""

    def __init__(self, turns: int = 1) -> None:
        self._left = turns

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return relax_gym.user("go"), {}

    async def step(self, action: str) -> Any:
        self._left -= 1
        more = [] if self._left == 0 else relax_gym.user("go on")
        return relax_gym.StepResult(more, float(self.np_random.random()), not more, False, {})

    async def close(self) -> None:  # type: ignore[override]
        pass


relax_gym.register("benchmark/Answer-v0", Answer)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Seconds of a step and of a publication, and an engine, whose speed may depend on how many are decoded at once."""

    tokens_per_second: float | Callable[[int], float]
    places: int
    learner_seconds: float
    publish_seconds: float


@dataclass(frozen=True, kw_only=True)
class Study:
    """Runs that are compared, on `machine`, or `together`. `steps` with those that do not count, `skipped` at the
    beginning; lengths are lognormal."""

    machine: Machine
    together: Machine | None = None
    steps: int
    skipped: int
    groups: int
    group_size: int
    turns: int
    median: float
    sigma: float
    most: int


def speed(engines: int) -> Callable[[int], float]:
    """Tokens/s of each of so many requests on SGLang, a 0.6B model and H200s: fitted to what `async_training.py` took
    for 640 episodes that were sampled to their end."""
    return lambda running: 1 / (0.0025 + 0.000035 * running / engines)


PLACES = Study(
    machine=Machine(tokens_per_second=20.0, places=16, learner_seconds=6.0, publish_seconds=0.1),
    steps=24,
    skipped=4,
    groups=8,
    group_size=4,
    turns=1,
    median=20.0,
    sigma=1.0,
    most=240,
)
LOAD = Study(
    machine=Machine(tokens_per_second=speed(1), places=1_000_000, learner_seconds=2.2, publish_seconds=0.2),
    together=Machine(tokens_per_second=speed(2), places=1_000_000, learner_seconds=1.45, publish_seconds=0.3),
    steps=40,
    skipped=10,
    groups=16,
    group_size=8,
    turns=3,
    median=128.0,
    sigma=1.2,
    most=1024,
)
"""What `async_training.py` has on two H200s."""


@dataclass(frozen=True)
class Mode:
    """What is varied of `[train]`, `learner.stream`, and whether engine and learner have all devices in turn."""

    max_staleness: int
    order: str = "slot"
    oversample: int = 0
    stream: bool = False
    colocated: bool = False


BY_PLACES = (
    *(Mode(0), Mode(1), Mode(2), Mode(4), Mode(2, "ready"), Mode(2, "ready", 2), Mode(0, "ready", 4)),
    *(Mode(staleness, stream=True) for staleness in (0, 1, 2)),
)
BY_LOAD = (
    *(Mode(0, colocated=True), Mode(0), Mode(1), Mode(2), Mode(4), Mode(4, "ready"), Mode(4, "ready", 4)),
    *(Mode(staleness, stream=True) for staleness in (0, 1, 2, 4)),
)


def simulate(study: Study, mode: Mode, folder: Path, *, seed: int) -> dict[str, Any]:
    """Train in `folder`. Simulated seconds a step, all but the first steps', and what they consist of."""
    tokenizer = tiny_tokenizer()
    varied = {name: getattr(mode, name) for name in ("max_staleness", "order", "oversample")}
    sizes = {"steps": study.steps, "groups_per_step": study.groups, "group_size": study.group_size}
    config = parse_config(
        {
            "seed": seed,
            "run_dir": str(folder),
            "model": {"name": "tiny-qwen3"},
            "env": [{"id": "benchmark/Answer-v0", "kwargs": {"turns": study.turns}}],
            "rollout": {"max_turns": study.turns, "max_new_tokens": study.most},
            "train": {**sizes, **varied},
            "trackers": [],
        }
    )
    machine = study.together if mode.colocated and study.together else study.machine
    loop = SimulatedLoop()
    engine = SimulatedEngine(
        heavy_tailed(study.median, study.sigma, study.most),
        concurrency=machine.places,
        tokens_per_second=machine.tokens_per_second,
        publish_seconds=machine.publish_seconds,
    )
    parts = Parts(
        context=RunContext(config=config, run_dir=folder, model_path=folder, tokenizer=tokenizer),
        renderer=ChatRenderer(tokenizer, config.chat),
        tasks=TaskSource(config.env, seed=seed, eval_episodes=0),
        algorithms=load_algorithms(config),
        rewards=build_rewards(config),
        sampler=engine,
    )
    whole, each = (0.0, machine.learner_seconds / study.groups) if mode.stream else (machine.learner_seconds, 0.0)
    learner = SimulatedLearner(loop, lambda batch: whole, group_seconds=each)
    loop.run(Trainer(parts, learner, [], RunFolder(config, resume=False)).run())
    return {**asdict(mode), **summary(folder, study)}


def summary(folder: Path, study: Study) -> dict[str, Any]:
    """Means over the steps that count, and the bound: no step is shorter than the work of either side. Where the speed
    of the engine depends on its load, it has no such work, and the steps in which it runs dry do not count."""
    by_places = not callable(study.machine.tokens_per_second)
    lines = read_lines(folder / "metrics.jsonl")[study.skipped :]
    steps = [
        event for event in learner_spans(folder / "timeline.json", "step") if event["args"]["number"] > study.skipped
    ]
    if not by_places:
        dry = int(max(line["staleness/max"] for line in lines))
        lines, steps = lines[: len(lines) - dry], steps[: len(steps) - dry]
    seconds = sum(event["dur"] for event in steps) / 1e6 / len(steps)
    begin, end = steps[0]["ts"], steps[-1]["ts"] + steps[-1]["dur"]
    work = sum(
        event["dur"]
        for name in ("train", "publish", "prepare")
        for event in learner_spans(folder / "timeline.json", name)
        if begin <= event["ts"] < end
    )
    learner = work / 1e6 / len(steps)
    engine = sum(line["sampler/busy_seconds"] for line in lines) / study.machine.places / len(lines)
    return {
        "step_seconds": seconds,
        "learner_seconds": learner,
        **({"engine_seconds": engine, "bound_seconds": max(learner, engine)} if by_places else {}),
        "data_wait_share": sum(line["time/learner_bubble"] for line in lines) / len(lines) / seconds,
        "sampler_idle_share": sum(line["time/sampler_bubble"] for line in lines) / len(lines) / seconds,
        "staleness_mean": sum(line["staleness/mean"] for line in lines) / len(lines),
        "staleness_max": max(line["staleness/max"] for line in lines),
    }


def table(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Lines of a Markdown table, one for each mode."""
    out = [
        "| `max_staleness` | order | oversample | stream | s a step | faster | above the bound | learner waits "
        "| mean lag |",
        "|---:|---|---:|---|---:|---:|---:|---:|---:|",
    ]
    for one in runs:
        above = f"{one['step_seconds'] / one['bound_seconds'] - 1:.1%}" if "bound_seconds" in one else ""
        out.append(
            f"| {one['max_staleness']}{', colocated' if one['colocated'] else ''} | {one['order']} "
            f"| {one['oversample']} | {'yes' if one['stream'] else ''} "
            f"| {one['step_seconds']:.2f} | {runs[0]['step_seconds'] / one['step_seconds']:.2f}× | {above} "
            f"| {one['data_wait_share']:.1%} | {one['staleness_mean']:.2f} |"
        )
    return out


def compare(study: Study, modes: Sequence[Mode], folder: Path, seed: int) -> list[dict[str, Any]]:
    """A run of each mode, printed."""
    runs: list[dict[str, Any]] = []
    for number, mode in enumerate(modes):
        runs.append(simulate(study, mode, folder / str(number), seed=seed))
        print(table([runs[0], runs[-1]])[-1], flush=True)
    print("\n".join(table(runs)))
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        places = Path(name) / "places"
        by_places = compare(PLACES, BY_PLACES, places, arguments.seed)
        by_load = compare(LOAD, BY_LOAD, Path(name) / "load", arguments.seed)
        if arguments.write:
            result = {**describe(), "seed": arguments.seed, "by_places": by_places, "by_load": by_load}
            (ROOT / "benchmarks/results/async_simulation_cpu.json").write_text(json.dumps(result, indent=2) + "\n")
            shown = {mode: places / str(BY_PLACES.index(mode)) for mode in (Mode(0), Mode(2))}
            files = {f"max_staleness = {mode.max_staleness}": path / "timeline.json" for mode, path in shown.items()}
            draw({mode: (file, 6) for mode, file in files.items()}, ROOT / "docs/async_timeline.png", steps=3)


if __name__ == "__main__":
    main()
