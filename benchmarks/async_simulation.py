"""How much asynchronous training saves on a heavy-tailed engine: the real loop, in simulated time.

    python benchmarks/async_simulation.py --write

One engine and one learner, both simulated (`relax_gym.testing`), train in lockstep and then asynchronously. Writes
benchmarks/results/async_simulation_cpu.json and, from two of the timelines, docs/async_timeline.png.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
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
STEPS, SKIPPED, GROUPS, GROUP_SIZE = 24, 4, 8, 4
MEDIAN, SIGMA, MOST, TOKENS_PER_SECOND = 20.0, 1.0, 240, 20.0
CONCURRENCY = 16
PUBLISH_SECONDS = 0.1


class Answer(relax_gym.Env):
    """One turn."""

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return relax_gym.user("go"), {}

    async def step(self, action: str) -> Any:
        return relax_gym.StepResult([], float(self.np_random.random()), True, False, {})

    async def close(self) -> None:  # type: ignore[override]
        pass


relax_gym.register("benchmark/Answer-v0", Answer)


@dataclass(frozen=True)
class Mode:
    """What is varied of `[train]`, and `learner.stream`."""

    max_staleness: int
    order: str = "slot"
    oversample: int = 0
    stream: bool = False


MODES = (
    *(Mode(0), Mode(1), Mode(2), Mode(4), Mode(2, "ready"), Mode(2, "ready", 2), Mode(0, "ready", 4)),
    *(Mode(staleness, stream=True) for staleness in (0, 1, 2)),
)


def simulate(mode: Mode, folder: Path, *, seed: int, learner_seconds: float, steps: int = STEPS) -> dict[str, Any]:
    """Train in `folder`. Simulated seconds a step, all but the first steps', and what they consist of."""
    tokenizer = tiny_tokenizer()
    varied = asdict(mode)
    stream = varied.pop("stream")
    config = parse_config(
        {
            "seed": seed,
            "run_dir": str(folder),
            "model": {"name": "tiny-qwen3"},
            "env": [{"id": "benchmark/Answer-v0"}],
            "rollout": {"max_turns": 1, "max_new_tokens": MOST},
            "train": {"steps": steps, "groups_per_step": GROUPS, "group_size": GROUP_SIZE, **varied},
            "trackers": [],
        }
    )
    loop = SimulatedLoop()
    engine = SimulatedEngine(
        heavy_tailed(MEDIAN, SIGMA, MOST),
        concurrency=CONCURRENCY,
        tokens_per_second=TOKENS_PER_SECOND,
        publish_seconds=PUBLISH_SECONDS,
    )
    parts = Parts(
        context=RunContext(config=config, run_dir=folder, model_path=folder, tokenizer=tokenizer),
        renderer=ChatRenderer(tokenizer, config.chat),
        tasks=TaskSource(config.env, seed=seed, eval_episodes=0),
        algorithms=load_algorithms(config),
        rewards=build_rewards(config),
        sampler=engine,
    )
    group_seconds = learner_seconds / GROUPS if stream else 0.0
    learner = SimulatedLearner(loop, lambda batch: 0.0 if stream else learner_seconds, group_seconds=group_seconds)
    loop.run(Trainer(parts, learner, [], RunFolder(config, resume=False)).run())
    return {**asdict(mode), **summary(folder)}


def summary(folder: Path) -> dict[str, float]:
    """Means over the steps after the first ones, and the bound: no step is shorter than the work of either side."""
    lines = read_lines(folder / "metrics.jsonl")[SKIPPED:]
    steps = [event for event in learner_spans(folder / "timeline.json", "step") if event["args"]["number"] > SKIPPED]
    seconds = sum(event["dur"] for event in steps) / 1e6 / len(steps)
    begin, end = steps[0]["ts"], steps[-1]["ts"] + steps[-1]["dur"]
    work = sum(
        event["dur"]
        for name in ("train", "publish", "prepare")
        for event in learner_spans(folder / "timeline.json", name)
        if begin <= event["ts"] < end
    )
    learner = work / 1e6 / len(steps)
    engine = sum(line["sampler/busy_seconds"] for line in lines) / CONCURRENCY / len(lines)
    return {
        "step_seconds": seconds,
        "learner_seconds": learner,
        "engine_seconds": engine,
        "bound_seconds": max(learner, engine),
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
        out.append(
            f"| {one['max_staleness']} | {one['order']} | {one['oversample']} | {'yes' if one['stream'] else ''} "
            f"| {one['step_seconds']:.2f} "
            f"| {runs[0]['step_seconds'] / one['step_seconds']:.2f}× "
            f"| {one['step_seconds'] / one['bound_seconds'] - 1:.1%} | {one['data_wait_share']:.1%} "
            f"| {one['staleness_mean']:.2f} |"
        )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--learner-seconds", type=float, default=6.0)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        runs, folders = [], {}
        for number, mode in enumerate(MODES):
            folder = folders[mode] = Path(name) / str(number)
            runs.append(simulate(mode, folder, seed=arguments.seed, learner_seconds=arguments.learner_seconds))
            print(table([runs[0], *runs[-1:]])[-1], flush=True)
        print("\n".join(table(runs)))
        if arguments.write:
            result = {**describe(), "seed": arguments.seed, "simulated_learner_seconds": arguments.learner_seconds}
            result |= {"concurrency": CONCURRENCY, "steps": STEPS, "runs": runs}
            (ROOT / "benchmarks/results/async_simulation_cpu.json").write_text(json.dumps(result, indent=2) + "\n")
            shown = (Mode(0), Mode(2))
            files = {f"max_staleness = {mode.max_staleness}": folders[mode] / "timeline.json" for mode in shown}
            draw(files, ROOT / "docs/async_timeline.png", first=6, steps=3)


if __name__ == "__main__":
    main()
