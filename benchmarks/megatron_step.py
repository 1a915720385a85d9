"""Speed and memory of a whole training step: the Megatron learner by micro-batch size, recompute and layout, beside the
torch learner and the train part of TRL's GRPO on the same tokens.

    OMP_WAIT_POLICY=passive python benchmarks/megatron_step.py --size 0.6b --write

A step is forward, loss, backward and optimizer on rows of random tokens, each a prompt of its own and a completion that
is trained; random weights of Qwen3's shape. Each case is a process of its own with a time limit, and the result is
written after each: one that fails takes nothing with it. Medians of `--repeats` steps after `--warmups`.

MFU counts what the model needs and not what a learner computes again or for nothing: 6 for each weight of the matrices
of the layers (of the experts: those that a token uses) and each token, 6 · vocabulary · hidden for each trained token,
as prompts need no head, and 6 · layers · heads · head_dim · length² for the causal attention of each row; over seconds,
GPUs and 989e12, the dense bfloat16 peak of an H100 and H200. Input embeddings and norms count nothing.

Layouts share one host: `--layouts dp=2 tp=2,cp=2`. Those with dp train as many rows on each GPU as one GPU does; the
others share its rows. TRL trains at `--rows-at-once` rows a pass, as often as the batch takes, without checkpointing.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import describe, installed
from shapes import GPU, SHAPES, build_model, training_flops

from relax_gym.config import RunConfig
from relax_gym.context import RunContext
from relax_gym.models import load_tokenizer
from relax_gym.types import Batch, StopReason, TrainingSample

PEAK = 989e12
KINDS = ("steps", "torch", "trl", "layouts")
RESULTS = Path(__file__).parent / "results"
MARK = "RESULT "
SPARE_SECONDS = 60.0
"""Between the time limit of a call, after which the learner ends its ranks itself, and that of the process, which
starts them before."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What one process measures. `at_once` is in tokens, for TRL in rows; `layout` and `offload_optimizer` as for the
    learner's options, and `logprob_chunk` too, where it is not 0."""

    learner: str
    size: str
    rows: int
    prompt: int
    completion: int
    at_once: int
    logprob_chunk: int = 0
    recompute: str = "none"
    offload_optimizer: bool = False
    dtype: str = "bfloat16"
    layout: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def gpus(self) -> int:
        """How many it uses."""
        return int(np.prod([size for name, size in self.layout.items() if name in ("tp", "pp", "cp", "dp")] or [1]))

    @property
    def total_rows(self) -> int:
        """With those that data parallelism adds."""
        return self.rows * self.layout.get("dp", 1)


# One case, in its process ---------------------------------------------------------------------------------------------


def random_ids(case: Case) -> np.ndarray[Any, np.dtype[np.int32]]:
    """[rows, tokens]."""
    shape = (case.total_rows, case.prompt + case.completion)
    return np.random.default_rng(0).integers(1, SHAPES[case.size].vocabulary, shape, dtype=np.int32)


def make_batch(case: Case) -> Batch:
    """Groups of two rows, with advantages 1 and -1, and log-probs as if all tokens were as likely."""
    uniform = np.float32(-np.log(SHAPES[case.size].vocabulary))
    mask = np.repeat(np.array([0, 1], dtype=np.int8), [case.prompt, case.completion])
    span = (case.prompt, case.prompt + case.completion)
    samples = [
        TrainingSample(
            episode_id=f"e{number}",
            group_id=f"g{number // 2}",
            env_id="bench/None-v0",
            segment=0,
            token_ids=ids,
            loss_mask=mask,
            logprobs=mask * uniform,
            versions=np.where(mask == 1, 0, -1).astype(np.int32),
            advantages=(mask * (-1.0) ** number).astype(np.float32),
            turn_spans=(span,),
            turn_rewards=(0.0,),
            reward=0.0,
            stop_reason=StopReason.ENV_DONE,
        )
        for number, ids in enumerate(random_ids(case))
    ]
    return Batch(version=0, samples=samples)


def make_learner(case: Case, model: Path, folder: Path, limit: float) -> Any:
    """The torch or the Megatron learner."""
    train = {"steps": 100, "groups_per_step": max(1, case.total_rows // 2), "group_size": 2}
    told = {"model": {"name": str(model)}, "env": [{"id": "bench/None-v0"}], "algorithm": {"name": "grpo"}}
    config = RunConfig.model_validate({**told, "train": train})
    context = RunContext(config=config, run_dir=folder, model_path=model, tokenizer=load_tokenizer(model))
    common: dict[str, Any] = {"dtype": case.dtype, "micro_batch_tokens": case.at_once}
    if case.logprob_chunk:
        common["logprob_chunk"] = case.logprob_chunk
    if case.learner == "torch":
        from relax_gym_trainers.torch_learner.learner import TorchLearner
        from relax_gym_trainers.torch_learner.options import TorchLearnerOptions

        return TorchLearner(context, TorchLearnerOptions(activation_checkpointing=case.recompute != "none", **common))
    from relax_gym_trainers.megatron_learner.learner import MegatronLearner
    from relax_gym_trainers.megatron_learner.options import MegatronLearnerOptions

    limits = {"timeout": limit, "start_timeout": limit}
    memory = {"recompute": case.recompute, "offload_optimizer": case.offload_optimizer}
    options = MegatronLearnerOptions(**memory, **case.layout, **limits, **common)
    return MegatronLearner(context, options)


def measure(case: Case, model: Path, warmups: int, repeats: int, limit: float) -> dict[str, Any]:
    """Seconds of each step, the peak of memory on the first GPU, and what the last step said."""
    learner = None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if case.learner == "trl":
            from trl_step import make_step

            ids = torch.from_numpy(random_ids(case).astype(np.int64))
            options: dict[str, Any] = {"dtype": case.dtype, "checkpointing": case.recompute != "none"}
            step: Callable[[], Any] = make_step(model, folder, ids, case.prompt, rows_at_once=case.at_once, **options)
        else:
            learner = make_learner(case, model, folder, limit)
            step = functools.partial(learner.step, make_batch(case))
        seconds = []
        for repeat in range(warmups + repeats):
            if repeat == warmups and GPU:
                torch.cuda.reset_peak_memory_stats()
            begin = time.perf_counter()
            metrics = step()
            if GPU:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
        if learner is not None:
            learner.close()
    told = {"peak_gb": torch.cuda.max_memory_allocated() / 1e9} if GPU else {}
    return {"seconds": seconds[warmups:], "warmup_seconds": seconds[:warmups], **told, "metrics": metrics}


# All cases ------------------------------------------------------------------------------------------------------------


def cases(args: argparse.Namespace) -> list[Case]:
    """In the order in which they are measured, those that the others are compared with first."""
    batch = {"size": args.size, "rows": args.rows, "prompt": args.prompt, "completion": args.completion}
    batch["dtype"] = args.dtype
    short = {**batch, "rows": args.trl_rows, "prompt": args.trl_prompt, "completion": args.trl_completion}
    found = []
    if "steps" in args.cases:
        ways = itertools.product(args.offload_optimizer, args.recompute, args.micro_batch_tokens, args.logprob_chunk)
        for away, way, n, chunk in ways:
            memory = {"recompute": way, "offload_optimizer": bool(away)}
            found.append(Case(learner="megatron", at_once=n, logprob_chunk=chunk, **memory, **batch))
    if "torch" in args.cases:
        found += [Case(learner="torch", at_once=n, **batch) for n in args.micro_batch_tokens]
    if "trl" in args.cases:
        found += [Case(learner=kind, at_once=args.micro_batch_tokens[0], **short) for kind in ("megatron", "torch")]
        found += [Case(learner="trl", at_once=n, **{**short, "dtype": args.trl_dtype}) for n in args.rows_at_once]
    if "layouts" in args.cases and args.layouts:
        layouts = [dict(one.split("=") for one in text.split(",")) for text in args.layouts]
        sizes = [{}, *({name: int(size) for name, size in layout.items()} for layout in layouts)]
        found += [Case(learner="megatron", at_once=args.micro_batch_tokens[0], layout=one, **batch) for one in sizes]
    return list({repr(case): case for case in found}.values())


def run(case: Case, model: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The case in a process of its own: its row of the result, with `error` if it failed."""
    row: dict[str, Any] = {**dataclasses.asdict(case), "gpus": case.gpus}
    if GPU and case.gpus > torch.cuda.device_count():
        return {**row, "error": f"needs {case.gpus} GPUs; there are {torch.cuda.device_count()}"}
    command = [sys.executable, __file__, "--child", json.dumps(dataclasses.asdict(case)), str(model)]
    command += ["--warmups", str(args.warmups), "--repeats", str(args.repeats), "--limit", str(args.limit)]
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count()))))
    visible = ",".join(shown.split(",")[: case.gpus])  # TRL refuses more than it uses
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": visible, "HF_HUB_OFFLINE": "1"}
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": args.limit + SPARE_SECONDS, "env": env}
    try:
        done = subprocess.run(command, check=False, **options)
    except subprocess.TimeoutExpired as error:
        said = (error.stderr or b"").decode(errors="replace")
        return {**row, "error": f"took longer than {args.limit:g} s", "stderr": said[-4000:]}
    told = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not told:
        lost = "out of memory" in done.stderr
        return {**row, "error": "out of memory" if lost else "failed", "stderr": done.stderr[-4000:]}
    row |= json.loads(told[-1].removeprefix(MARK))
    median = statistics.median(row["seconds"])
    tokens = case.total_rows * (case.prompt + case.completion)
    needed = training_flops(SHAPES[case.size], case.total_rows, case.prompt, case.completion)
    mfu = needed / median / case.gpus / PEAK if GPU else None
    return {**row, "median": median, "tokens_per_s": tokens / median, "mfu": mfu}


def compare(rows: list[dict[str, Any]]) -> None:
    """Give each row `speedup`: its tokens/s over those of the Megatron learner on one GPU on the same rows, which if it
    has one with as large micro-batches is that, else its fastest."""
    measured = [row for row in rows if "median" in row]
    for row in measured:
        alone = [one for one in measured if one["learner"] == "megatron" and one["gpus"] == 1]
        same = [one for one in alone if all(one[name] == row[name] for name in ("rows", "prompt", "completion"))]
        exact = [one for one in same if (one["at_once"], one["recompute"]) == (row["at_once"], "none")]
        if same:
            row["speedup"] = row["tokens_per_s"] / max(one["tokens_per_s"] for one in exact or same)


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    print("\n| learner | rows | at once | log-prob chunk | recompute | optimizer in | layout ", end="")
    print("| s | tokens/s | MFU | peak GB | to one GPU of Megatron |")
    print("|---|---|---:|---:|---|---|---|---:|---:|---:|---:|---:|")
    for row in rows:
        layout = ",".join(f"{name}={size}" for name, size in row["layout"].items())
        head = f"| {row['learner']} {row['dtype']} | {row['rows']} x {row['prompt']}+{row['completion']} | "
        head += f"{row['at_once']:,} | {row['logprob_chunk'] or ''} | {row['recompute']} | "
        head += f"{'host' if row['offload_optimizer'] else ''} | {layout} | "
        if "median" not in row:
            print(f"{head}{row['error']} | | | | |")
            continue
        mfu = f"{row['mfu']:.1%}" if row["mfu"] is not None else ""
        peak = f"{row['peak_gb']:.1f}" if "peak_gb" in row else ""
        ratio = f"{row['speedup']:.2f}" if "speedup" in row else ""
        print(f"{head}{row['median']:.3f} | {row['tokens_per_s']:,.0f} | {mfu} | {peak} | {ratio} |")


def arguments() -> argparse.Namespace:
    """What to measure."""
    tiny = "tiny" in " ".join(sys.argv)
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--size", default="0.6b", choices=SHAPES)
    made.add_argument("--cases", nargs="+", default=KINDS, choices=KINDS)
    made.add_argument("--micro-batch-tokens", nargs="+", type=int, default=[64, 128] if tiny else [8192, 16384, 32768])
    made.add_argument("--recompute", nargs="+", default=["none", "full"], choices=["none", "selective", "full"])
    made.add_argument("--logprob-chunk", nargs="+", type=int, default=[0], help="of `steps`; 0: the learner's own")
    made.add_argument("--offload-optimizer", nargs="+", type=int, default=[0], choices=[0, 1], help="of `steps`")
    made.add_argument("--layouts", nargs="*", default=[], metavar="dp=2")
    for name, small, large in (("rows", 8, 64), ("prompt", 8, 256), ("completion", 24, 768)):
        made.add_argument(f"--{name}", type=int, default=small if tiny else large)
    for name, small, large in (("rows", 8, 64), ("prompt", 8, 128), ("completion", 16, 512)):
        made.add_argument(f"--trl-{name}", type=int, default=small if tiny else large)
    made.add_argument("--rows-at-once", nargs="+", type=int, default=[4] if tiny else [8, 16, 32])
    made.add_argument("--trl-dtype", default="float32", choices=["float32", "bfloat16"], help="of TRL's weights")
    made.add_argument("--dtype", default="bfloat16" if GPU else "float32", choices=["bfloat16", "float32"])
    made.add_argument("--warmups", type=int, default=2)
    made.add_argument("--repeats", type=int, default=5)
    made.add_argument("--limit", type=float, default=120.0, help="seconds of one case")
    made.add_argument("--write", action="store_true", help="write the result into benchmarks/results")
    made.add_argument("--out", type=Path, help="write the result into this file")
    made.add_argument("--child", nargs=2, metavar=("CASE", "MODEL"), help="only measure this case")
    return made.parse_args()


def main() -> None:
    """Measure, print and, when asked, write after each case."""
    args = arguments()
    if args.child:
        case = Case(**json.loads(args.child[0]))
        print(MARK + json.dumps(measure(case, Path(args.child[1]), args.warmups, args.repeats, args.limit)), flush=True)
        return
    versions = {name: installed(name) for name in ("megatron-core", "trl", "accelerate")}
    result: dict[str, Any] = {**describe(), **versions, "dtype": args.dtype, "size": args.size, "rows": []}
    kind = f"_{args.cases[0]}" if len(args.cases) == 1 and args.cases != ["steps"] else ""
    ours = RESULTS / f"megatron_step_{args.size}{kind}_{'gpu' if GPU else 'cpu'}.json"
    targets = [target for target in (ours if args.write else None, args.out) if target]
    with tempfile.TemporaryDirectory() as name:
        model = build_model(args.size, Path(name), getattr(torch, args.dtype))
        if GPU:
            torch.cuda.empty_cache()
        for case in cases(args):
            row = run(case, model, args)
            result["rows"].append(row)
            compare(result["rows"])
            print({key: row.get(key) for key in ("learner", "at_once", "layout", "median", "error")}, flush=True)
            for target in targets:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    show(result["rows"])
    for row in result["rows"]:
        if "stderr" in row:
            print(f"\n{row['learner']} {row['at_once']} {row['layout']}:\n{row['stderr'][-1500:]}")


if __name__ == "__main__":
    main()
