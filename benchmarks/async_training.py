"""Steps per hour of colocated, hybrid and asynchronous training on real SGLang servers, through `relax_gym.train`.

    python benchmarks/async_training.py --model 0.6b --write

Each mode is a run of its own, in a process of its own, with the same tasks, lengths of answers and seeds:

colocated   all GPUs sample, then all train; on-policy, and the servers' memory is freed while the learner works
hybrid      `--engine-gpus` sample while `--learner-gpus` wait, and the other way round; on-policy
async-N     the same GPUs with `max_staleness = N`; weights change while answers are being sampled

`-ready` after a mode's name is `order = "ready"`, and `-stream` after that trains on groups as they finish.

Where one GPU is all there is, all modes share it, and async-N is a queue that runs ahead. On a CPU server and learner
have a thread each, and colocated is hybrid with the calls that free memory, which free none there.

A model is a folder, or a random Qwen3 of that shape (see `rambling.py`). A run has `--warmups` steps, then as many as
it may be ahead, then `--steps` that count, then as many as it may be ahead once more, when rollouts run dry. When
`--limit` is near, a run is stopped as by SIGTERM and what it has done counts. Modes that an earlier `--write` has
measured with the same settings are kept, so that several calls can make one file.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import rambling
import torch
from sglang_kit import RESULTS, finish, machine, parser, server_setup
from shapes import GPU, SHAPES, build_model
from timelines import draw, learner_spans

from relax_gym.config import parse_config
from relax_gym.errors import Stopped
from relax_gym.lines import read_lines
from relax_gym.overrides import apply_override
from relax_gym.train import train

COLOCATED, HYBRID = "colocated", "hybrid"
MODES = (COLOCATED, HYBRID, "async-1", "async-2", "async-4")
SETTINGS = (
    *("model", "learner", "dtype", "engine_gpus", "learner_gpus", "seed", "groups", "group_size", "turns", "prompt"),
    *("median", "sigma", "most", "micro_batch_tokens", "lr", "env", "on_update", "server_args", "set"),
)
"""Runs with the same of these can be compared."""
CLOSING_SECONDS = 40.0
"""What a run that is stopped may take to save and close."""


# One run --------------------------------------------------------------------------------------------------------------


def known(mode: str) -> str:
    """The mode. Raises ArgumentTypeError when there is no such."""
    if mode == COLOCATED or re.fullmatch(rf"({HYBRID}|async-[1-9]\d*)(-ready)?(-stream)?", mode):
        return mode
    said = (
        f"{mode!r} is no mode; give {COLOCATED}, {HYBRID} or async-N, such as async-2, and after it -ready or -stream"
    )
    raise argparse.ArgumentTypeError(said)


def staleness(mode: str) -> int:
    """Its `max_staleness`."""
    return int(mode.split("-")[1]) if mode.startswith("async-") else 0


def total_steps(mode: str, args: argparse.Namespace) -> int:
    """With those that do not count."""
    return int(args.warmups + args.steps + 2 * staleness(mode))


def run_config(mode: str, model: Path, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The config of a run, as its TOML would say it."""
    own = args.model not in SHAPES
    config: dict[str, Any] = {
        "seed": args.seed,
        "run_dir": str(folder),
        **({} if GPU else {"threads": 1}),
        "model": {"name": str(model)},
        "env": [{"id": args.env, "kwargs": {"turns": args.turns, "prompt": args.prompt}}],
        "rollout": {"max_turns": args.turns, "max_new_tokens": args.most},
        "sampler": {
            "name": rambling.SAMPLER,
            "median": args.median,
            "sigma": args.sigma,
            "ended_by_model": own,
            **sampler_section(mode, args),
        },
        "algorithm": {"name": "grpo"},
        "learner": learner_section(mode, args),
        "train": {
            "steps": total_steps(mode, args),
            "groups_per_step": args.groups,
            "group_size": args.group_size,
            "max_staleness": staleness(mode),
            "order": "ready" if "-ready" in mode else "slot",
        },
        "trackers": [],
    }
    if args.env != rambling.ENV:
        config["env"][0]["kwargs"] = {}
    for override in args.set:
        name, found, change = override.partition(":")
        if not found or name == mode:
            apply_override(config, change if found else override)
    return config


def sampler_section(mode: str, args: argparse.Namespace) -> dict[str, Any]:
    """Servers and where they run."""
    episodes = args.groups * args.group_size * (staleness(mode) + 1)
    graphs = sorted({1, 2, 4, 8, 16, 32, *range(64, episodes, 64), episodes})  # SGLang's own end at 128 or so
    fitting = {"mem_fraction_static": 0.5, "cuda_graph_bs_decode": graphs} if GPU else {"max_total_tokens": 65536}
    ours = {"max_running_requests": episodes, **fitting}
    arguments, environment = server_setup(args, **ours)
    section = {"python": args.python, "server_args": arguments, "env": environment, "on_update": args.on_update}
    section["colocate"] = mode == COLOCATED
    every = [str(gpu) for gpu in range(args.engine_gpus + args.learner_gpus)]
    if not GPU:
        return section
    if shared(args):
        return {**section, "sync": "ipc", "devices": ["0"]}
    if mode == COLOCATED:
        return {**section, "sync": "ipc", "engines": len(every), "devices": every}
    return {**section, "sync": "broadcast", "engines": args.engine_gpus, "devices": every[args.learner_gpus :]}


def learner_section(mode: str, args: argparse.Namespace) -> dict[str, Any]:
    """The learner and how many GPUs it has."""
    section: dict[str, Any] = {"name": args.learner, "lr": args.lr, "dtype": args.dtype}
    section |= {"micro_batch_tokens": args.micro_batch_tokens, "stream": mode.endswith("-stream")}
    if args.learner == "megatron":
        together = mode == COLOCATED and GPU and not shared(args)
        section |= {"dp": args.learner_gpus + (args.engine_gpus if together else 0), "checkpoint_model": False}
    return section


def shared(args: argparse.Namespace) -> bool:
    """Whether there is one GPU for both."""
    return bool(torch.cuda.device_count() < args.engine_gpus + args.learner_gpus)


def run(config: Path) -> None:
    """What the process of a run does."""
    rambling.register()
    try:
        train(parse_config(json.loads(config.read_text(encoding="utf-8"))))
    except Stopped as stopped:
        print(stopped)


def run_apart(config: dict[str, Any], folder: Path, seconds: float) -> str | None:
    """Run in a process of its own, which is asked to end after so many seconds: what went wrong, if anything did."""
    folder.mkdir(parents=True)
    file, log = folder.with_suffix(".json"), folder.with_suffix(".log")
    file.write_text(json.dumps(config, indent=2), encoding="utf-8")
    with log.open("wb") as out:  # no pipe: a helper of torch holds it for longer than the run
        command = [sys.executable, __file__, "--child", str(file)]
        child = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, "HF_HUB_OFFLINE": "1"})
        try:
            code = child.wait(seconds)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGTERM)
            try:
                code = child.wait(CLOSING_SECONDS)
                if code == -signal.SIGTERM:  # nothing of `train` was there to take it
                    return f"was stopped after {seconds:.0f} s, before it began or as it ended; raise --limit"
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
                return f"was asked to end after {seconds:.0f} s and had not {CLOSING_SECONDS:g} s later{said(log)}"
    return f"ended with exit code {code}{said(log)}" if code else None


def said(log: Path) -> str:
    """The end of what a run has printed."""
    return f":\n{log.read_text(errors='replace')[-4000:]}"


# What it took ---------------------------------------------------------------------------------------------------------


def measured(lines: list[dict[str, Any]], mode: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The steps that count."""
    ahead = staleness(mode)
    begin, end = args.warmups + ahead, total_steps(mode, args) - ahead
    return [line for line in lines if begin < line["step"] <= end]


def summary(mode: str, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The row of a mode. Rates and shares are of the whole time of its steps: where the
    learner runs ahead of the tail of rollouts, a median step is a short one. `time/step` leaves out checkpoints."""

    def total(name: str) -> float:
        return float(sum(line.get(name, 0.0) for line in lines))

    seconds = [line["time/step"] for line in lines]
    tokens = sum(line["perf/tokens_per_second"] * line["time/step"] for line in lines)
    lags = sorted({name for line in lines for name in line if name.startswith("staleness/tokens_lag_")})
    rewards = [line["reward/mean"] for line in lines if "reward/mean" in line]
    last = rewards[-max(1, len(rewards) // 2) :]
    return {
        "mode": mode,
        "max_staleness": staleness(mode),
        "steps": len(lines),
        "median_step_seconds": statistics.median(seconds),
        "mean_step_seconds": statistics.mean(seconds),
        "steps_per_hour": 3600 / statistics.mean(seconds),
        "step_seconds": seconds,
        "train_seconds": statistics.median(line["time/train"] for line in lines),
        "sync_seconds": statistics.median(line["time/publish"] for line in lines),
        "sampled_tokens_per_second": total("sampler/generated_tokens") / sum(seconds),
        "read_tokens_per_second": total("sampler/prompt_tokens") / sum(seconds),
        "trained_tokens_per_second": tokens / sum(seconds),
        "learner_wait_share": total("time/learner_bubble") / sum(seconds),
        "sampler_idle_share": total("time/sampler_bubble") / sum(seconds),
        "episode_seconds_p50": statistics.median(line.get("time/episode_p50", 0.0) for line in lines),
        "episode_seconds_max": max(line.get("time/episode_max", 0.0) for line in lines),
        "trained_tokens_by_lag": {name.rpartition("_")[2]: total(name) for name in lags},
        "logprob_diff_mean": statistics.mean(line.get("learner/logprob_diff_mean", 0.0) for line in lines),
        "first_reward": rewards[0] if rewards else None,
        "last_reward": statistics.mean(last) if last else None,
        "sampler_failures": total("sampler/failures"),
        "sampler_outages": total("sampler/outages"),
        "sampler_servers_min": min(line["sampler/servers"] for line in lines),
    }


def without_servers(row: dict[str, Any], engines: int) -> dict[str, Any] | None:
    """What stands in a row's place when fewer servers than that served at any time, as its rates are of fewer."""
    outages, least = row["sampler_outages"], row["sampler_servers_min"]
    if not outages and least >= engines:
        return None
    error = f"is no result: servers were out {outages:g} times, and a step ended with {least:g} of {engines}"
    error = "\n".join([*([row["error"]] if "error" in row else []), error])
    return {"mode": row["mode"], "error": error, "sampler_outages": outages, "sampler_servers_min": least}


def compare(rows: list[dict[str, Any]]) -> None:
    """Give each row its ratios to the colocated one."""
    base = next((row for row in rows if row["mode"] == COLOCATED and "steps_per_hour" in row), None)
    for row in rows if base else ():
        if base and "steps_per_hour" in row:
            row["to_colocated"] = row["steps_per_hour"] / base["steps_per_hour"]
            row["to_colocated_by_medians"] = base["median_step_seconds"] / row["median_step_seconds"]


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    print("\n| mode | steps/hour | to colocated (by medians) | s a step, mean (median) | train, s | sync, s ", end="")
    print("| tokens/s sampled, read, trained | learner waits | sampler idle | tokens by lag | reward, last steps |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---|---:|")
    for row in rows:
        if "steps_per_hour" not in row:
            print(f"| {row['mode']} | {row['error'].splitlines()[-1]} |")
            continue
        ratio = f"{row['to_colocated']:.2f} ({row['to_colocated_by_medians']:.2f})" if "to_colocated" in row else ""
        rates = [f"{row[f'{kind}_tokens_per_second']:,.0f}" for kind in ("sampled", "read", "trained")]
        trained = sum(row["trained_tokens_by_lag"].values()) or 1.0
        lags = [f"{lag}: {tokens / trained:.0%}" for lag, tokens in row["trained_tokens_by_lag"].items()]
        print(
            f"| {row['mode']} | {row['steps_per_hour']:,.0f} | {ratio} "
            f"| {row['mean_step_seconds']:.2f} ({row['median_step_seconds']:.2f}) "
            f"| {row['train_seconds']:.2f} | {row['sync_seconds']:.2f} | {', '.join(rates)} "
            f"| {row['learner_wait_share']:.1%} | {row['sampler_idle_share']:.1%} | {', '.join(lags)} "
            f"| {row['last_reward'] or 0:.3f} |"
        )


def draw_timelines(args: argparse.Namespace) -> None:
    """Two steps of the first mode, and as many seconds of the others, where enough steps were made."""
    files = {mode: (args.timelines / f"{mode}.json", args.warmups + staleness(mode)) for mode in args.modes}
    whole = {mode: (file, first) for mode, (file, first) in files.items() if steps_in(file) > first + 2}
    if whole:
        draw(whole, args.timelines / "timelines.png", steps=2)


def steps_in(timeline: Path) -> int:
    """How many the learner made."""
    return len(learner_spans(timeline, "step")) if timeline.exists() else 0


# All runs -------------------------------------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    """What to measure."""
    made = parser(__doc__, python=os.environ.get("RELAX_GYM_SGLANG_PYTHON", sys.executable))
    made.add_argument("--model", default="0.6b" if GPU else "tiny", help=f"a folder, or one of {', '.join(SHAPES)}")
    made.add_argument("--device", default="cuda" if GPU else "cpu", choices=["cuda", "cpu"])
    made.add_argument("--modes", nargs="+", default=MODES, type=known, metavar="MODE", help=", ".join(MODES))
    made.add_argument("--learner", default="megatron" if GPU else "torch", choices=["torch", "megatron"])
    for name, large, small in (("engine-gpus", 1, 0), ("learner-gpus", 1, 1)):
        made.add_argument(f"--{name}", type=int, default=large if GPU else small)
    made.add_argument("--steps", type=int, default=10, help="that count")
    made.add_argument("--warmups", type=int, default=2, help="steps before those, besides those of a filling queue")
    made.add_argument("--limit", type=float, default=460.0, help="seconds for all modes")
    made.add_argument("--seed", type=int, default=0)
    for name, large, small in (("groups", 16, 8), ("group-size", 8, 4), ("turns", 3, 2), ("prompt", 256, 32)):
        made.add_argument(f"--{name}", type=int, default=large if GPU else small)
    for name, large, small in (("median", 128, 32), ("most", 1024, 384), ("micro-batch-tokens", 16384, 4096)):
        made.add_argument(f"--{name}", type=int, default=large if GPU else small, help="tokens")
    made.add_argument("--sigma", type=float, default=1.2, help="of the logarithm of an answer's tokens")
    made.add_argument("--lr", type=float, default=1e-6 if GPU else 3e-3)
    made.add_argument("--env", default=rambling.ENV, help="another env's id")
    made.add_argument("--on-update", default="retract", choices=["abort", "retract", "keep"])
    made.add_argument("--set", action="append", default=[], metavar="[MODE:]KEY=VALUE", help="of the config; over ours")
    made.add_argument("--timelines", type=Path, metavar="FOLDER", help="keep and draw the timelines there")
    made.add_argument("--child", type=Path, metavar="CONFIG", help="only this run")
    args = made.parse_args()
    if args.device != ("cuda" if GPU else "cpu"):
        raise SystemExit("--device cpu needs CUDA_VISIBLE_DEVICES= in the environment, and cuda a GPU")
    return args


def get_model(args: argparse.Namespace, folder: Path) -> Path:
    """The model's folder, made if it is a shape."""
    if args.model not in SHAPES:
        return Path(args.model).resolve()
    model = build_model(args.model, folder / "model", getattr(torch, args.dtype))
    rambling.write_tokenizer(SHAPES[args.model].vocabulary, model)
    if GPU:
        torch.cuda.empty_cache()
    return model


def measure(mode: str, model: Path, folder: Path, args: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """The row of a mode."""
    begin = time.monotonic()
    config = run_config(mode, model, folder, args)
    error = run_apart(config, folder, max(1.0, seconds - CLOSING_SECONDS))
    metrics = folder / "metrics.jsonl"
    done = read_lines(metrics)
    few = f"{len(done)} steps in {seconds:.0f} s, of which the last {CLOSING_SECONDS:.0f} are for its end"
    row: dict[str, Any] = {"mode": mode, "error": error or f"made no step that counts: {few}; raise --limit"}
    if lines := measured(done, mode, args):
        row = {**summary(mode, lines), **({"error": error} if error and len(lines) < args.steps else {})}
        row = without_servers(row, config["sampler"].get("engines", 1)) or row
    if args.timelines and (folder / "timeline.json").exists():
        args.timelines.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / "timeline.json", args.timelines / f"{mode}.json")
    return {**row, "wall_seconds": time.monotonic() - begin}


def result_name(args: argparse.Namespace) -> str:
    """Of the result file, without the kind of machine."""
    model = args.model if args.model in SHAPES else Path(args.model).name
    return f"async_training_{model}{'_shared' if GPU and shared(args) else ''}"


def measured_before(name: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of the result file if it is of the same settings."""
    file = RESULTS / f"{name}_{'gpu' if GPU else 'cpu'}.json"
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return list(found["rows"]) if found.get("settings") == settings else []


def main() -> None:
    """Measure, print and, when asked, write after each mode."""
    args = arguments()
    if args.child:
        run(args.child)
        return
    end = time.monotonic() + args.limit
    name = result_name(args)
    settings = {key: getattr(args, key) for key in SETTINGS}
    rows = [row for row in measured_before(name, settings) if row["mode"] not in args.modes] if args.write else []
    head = {**machine(args, sampler_section(args.modes[0], args)["server_args"]), "settings": settings}
    with tempfile.TemporaryDirectory() as folder:
        model = get_model(args, Path(folder))
        for done, mode in enumerate(args.modes):
            seconds = (end - time.monotonic()) / (len(args.modes) - done)
            row = measure(mode, model, Path(folder) / mode, args, seconds)
            print(f"{mode}: {row.get('error', 'measured')}", flush=True)
            rows.append(row)
            rows.sort(key=lambda row: (row["mode"] != COLOCATED, not row["mode"].startswith(HYBRID), row["mode"]))
            compare(rows)
            finish({**head, "rows": rows}, name, args)
    show(rows)
    if args.timelines:
        draw_timelines(args)


if __name__ == "__main__":
    main()
