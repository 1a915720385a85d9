"""Output tokens/s of concurrent multi-turn episodes on an SGLang server, as a ratio to SGLang's offline engine.

Both sides have the same model (Qwen3's shape, random weights), arguments, prompts, lengths and log-probs, and their
caches across turns. An episode of the sampler goes on as soon as its own turn is done. The offline engine, in a process
of its own while no server runs, is used in both ways it has: `generate` with all prompts of a turn in one call, which
ends with the longest, and `async_generate` for each episode by itself. Nothing ends early: every completion is checked
to have all its tokens. Prompts are new in every repeat; the first repeat of each side is a warm-up.

`--spread 0` gives all completions one length: all episodes then end their turns together. With 0.5 each has between
half and one and a half times as many tokens.

    python benchmarks/sglang_rollouts.py --write
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from sglang_kit import child_environment, finish, machine, make_sampler, parser, read_weights, server_setup
from sglang_offline import WAYS, completion_length, random_ids
from shapes import SHAPES, build_model

from relax_gym.sampler import SamplingParams
from relax_gym_plugins.samplers.sglang.sampler import SGLangSampler

OFFLINE = Path(__file__).with_name("sglang_offline.py")
Work = dict[str, Any]


async def episode(sampler: SGLangSampler, work: Work, name: str) -> None:
    """One episode through a session."""
    session, size = sampler.open_session(), work["vocabulary"]
    prompt = random_ids(name, work["prompt"], size)
    for turn in range(work["turns"]):
        length = completion_length(name, turn, work)
        out = await session.generate(prompt, SamplingParams(max_new_tokens=length))
        if len(out.token_ids) != length:
            raise SystemExit(f"a completion has {len(out.token_ids)} tokens, not {length}: {out.finish_reason}")
        prompt = [*prompt, *out.token_ids, *random_ids(f"{name}/{turn}", work["observation"], size)]
    session.close()


async def play(sampler: SGLangSampler, work: Work, concurrency: int, name: str) -> tuple[float, int, int]:
    """All episodes at once: as `sglang_offline.play`."""
    sampler.metrics()
    start = time.perf_counter()
    await asyncio.gather(*(episode(sampler, work, f"{name}/{number}") for number in range(concurrency)))
    seconds, counts = time.perf_counter() - start, sampler.metrics()
    if counts.get("failures"):
        raise SystemExit(f"{counts['failures']:g} requests failed; see the server's log")
    return seconds, int(counts["prompt_tokens"]) - concurrency * work["prompt"], int(counts["cached_tokens"])


async def through_sampler(work: Work, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Each concurrency through one server."""
    model = Path(work["model"])
    sampler = make_sampler(model, folder, args, ours(args), sync="disk")
    result: dict[str, Any] = {}
    try:
        await sampler.start()
        await sampler.update_weights(read_weights(model, "cpu").items(), 0)
        for concurrency in work["concurrency"]:
            runs = [await play(sampler, work, concurrency, f"{concurrency}-{n}") for n in range(work["repeats"] + 1)][
                1:
            ]
            read, cached = sum(run[1] for run in runs), sum(run[2] for run in runs)
            hits = cached / read if read else None
            result[str(concurrency)] = {"seconds": [run[0] for run in runs], "cache_hit_rate": hits}
    finally:
        await sampler.aclose()
    return result


def offline(work: Work, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The same through the offline engine."""
    arguments, environment = server_setup(args, **ours(args))
    files = [folder / "work.json", folder / "result.json"]
    files[0].write_text(json.dumps({**work, "server_args": arguments}))
    log = folder / "offline.log"
    with log.open("w") as out:
        command = [args.python, str(OFFLINE), *map(str, files)]
        env = child_environment(args.python, environment)
        code = subprocess.run(command, env=env, stdout=out, stderr=out).returncode
    if code:
        raise SystemExit(f"{' '.join(command)} ended with {code}:\n{log.read_text()[-3000:]}")
    found: dict[str, Any] = json.loads(files[1].read_text())
    return found


def ours(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments for both sides: as many requests at once as there are episodes."""
    return {"max_running_requests": max(args.concurrency)}


def possible_hits(work: Work) -> float:
    """Share of the prompts after the first turn that the turns before have read or sampled."""
    turns = range(1, work["turns"])
    lengths = [work["prompt"] + turn * (work["output"] + work["observation"]) for turn in turns]
    return float(1 - len(lengths) * (work["observation"] + 1) / sum(lengths))  # a last token is sampled, but not read


def tokens_of(work: Work, concurrency: int, name: str) -> int:
    """Tokens that all episodes of a repeat sample."""
    turns = range(work["turns"])
    return sum(completion_length(f"{name}/{number}", turn, work) for number in range(concurrency) for turn in turns)


def row(work: Work, concurrency: int, sides: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Tokens per second of all sides over all rounds."""
    out: dict[str, Any] = {"concurrency": concurrency}
    for side, rounds in sides.items():
        name = f"{concurrency}" if side == "sampler" else f"{concurrency}-{side}"
        tokens = [tokens_of(work, concurrency, f"{name}-{n + 1}") for n in range(work["repeats"])]
        found = [one[str(concurrency)] for one in rounds]
        rates = [count / s for one in found for count, s in zip(tokens, one["seconds"], strict=True)]
        out[f"{side}_tokens_per_second"] = [round(rate, 1) for rate in rates]
        out[f"{side}_cache_hit_rate"] = found[-1]["cache_hit_rate"]
    for way in WAYS:
        medians = [statistics.median(out[f"{side}_tokens_per_second"]) for side in ("sampler", way)]
        out[f"ratio_to_{way}"] = round(medians[0] / medians[1], 3)
    return out


def show(result: dict[str, Any]) -> None:
    """Print the table."""
    print(f"cache hits that are possible after the first turn: {result['possible_cache_hit_rate']:.3f}\n")
    print(
        "| episodes at once | sampler, tokens/s | generate by turn | async_generate by episode | ratios | cache hits |"
    )
    print("|---:|---:|---:|---:|---:|---:|")
    for r in result["rows"]:
        rates = [f"{statistics.median(r[f'{side}_tokens_per_second']):,.0f}" for side in ("sampler", *WAYS)]
        hits = [f"{r[f'{side}_cache_hit_rate'] or 0:.3f}" for side in ("sampler", *WAYS)]
        ratios = [f"{r[f'ratio_to_{way}']:.3f}" for way in WAYS]
        print(f"| {r['concurrency']:,} | {' | '.join(rates)} | {', '.join(ratios)} | {', '.join(hits)} |")


def main() -> None:
    """Measure both sides, print and, when asked, write."""
    made = parser(__doc__)
    made.add_argument("--size", default="0.6b", choices=SHAPES)
    made.add_argument("--concurrency", type=int, nargs="+", default=[1, 64, 256, 1024])
    made.add_argument("--turns", type=int, default=3)
    for name, tokens in {"prompt": 256, "output": 128, "observation": 32}.items():
        made.add_argument(f"--{name}", type=int, default=tokens, help="tokens")
    made.add_argument("--spread", type=float, default=0.0, help="share by which completions are longer or shorter")
    made.add_argument("--repeats", type=int, default=3, help="of each concurrency, after one to warm up")
    made.add_argument("--rounds", type=int, default=1, help="starts of each side, in turns")
    args = made.parse_args()
    lengths = ("turns", "prompt", "output", "observation", "spread", "concurrency", "repeats")
    with tempfile.TemporaryDirectory() as folder:
        model = build_model(args.size, Path(folder) / "model", getattr(torch, args.dtype))
        work = {name: getattr(args, name) for name in lengths}
        work |= {"model": str(model), "vocabulary": SHAPES[args.size].vocabulary}
        sides: dict[str, list[dict[str, Any]]] = {"sampler": [], **{way: [] for way in WAYS}}
        for _ in range(args.rounds):
            found = offline(work, Path(folder), args)
            print("engine:", json.dumps(found), flush=True)  # in case the other side fails
            for way in WAYS:
                sides[way].append(found[way])
            sides["sampler"].append(asyncio.run(through_sampler(work, Path(folder), args)))
    rows = [row(work, concurrency, sides) for concurrency in args.concurrency]
    head = {**machine(args, server_setup(args, **ours(args))[0]), "size": args.size, "spread": args.spread}
    result = {**head, "possible_cache_hit_rate": possible_hits(work), "rows": rows}
    show(result)
    finish(result, f"sglang_rollouts{'_spread' if args.spread else ''}", args)


if __name__ == "__main__":
    main()
