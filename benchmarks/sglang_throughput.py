"""Output tokens per second of multi-turn episodes through the SGLang sampler, beside SGLang's own offline engine.

Both do the same work: as many conversations at once, the same prompts and lengths, log-probs returned. The sampler asks
a server over HTTP, each episode as soon as its turn is over; `Engine.generate` gets one list of all prompts a turn.
The model has random weights and no end token, so that every completion has its full length.

    python benchmarks/sglang_throughput.py --write
"""

from __future__ import annotations

import argparse
import asyncio
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
from sglang_engine import first_prompt, next_prompt
from sglang_models import SIZES, make_context, make_model, weights_of

from relax_gym.sampler import SamplingParams
from relax_gym_plugins.samplers.sglang.options import SGLangSamplerOptions
from relax_gym_plugins.samplers.sglang.sampler import SGLangSampler

RESULTS = Path(__file__).parent / "results"


async def play(sampler: SGLangSampler, episodes: int, repeat: int, plan: argparse.Namespace) -> float:
    """Seconds that all episodes take together."""

    async def episode(number: int) -> None:
        session, prompt = sampler.open_session(), first_prompt(number, repeat, plan.prompt)
        for _ in range(plan.turns):
            done = await session.generate(prompt, SamplingParams(max_new_tokens=plan.output))
            assert len(done.token_ids) == plan.output
            prompt = next_prompt(prompt, list(done.token_ids), plan.observation)
        session.close()

    start = time.perf_counter()
    await asyncio.gather(*(episode(number) for number in range(episodes)))
    return time.perf_counter() - start


async def measure_sampler(folder: Path, plan: argparse.Namespace) -> dict[str, Any]:
    """Seconds by concurrency, and the share of the prompts of later turns that was cached."""
    options = SGLangSamplerOptions(server_args=plan.server_args, python=plan.python, env=plan.env)
    sampler = SGLangSampler(make_context(folder, folder / "run"), options)
    seconds: dict[int, list[float]] = {}
    try:
        await sampler.start()
        await sampler.update_weights(weights_of(folder), 0)
        for episodes in plan.concurrency:
            await play(sampler, episodes, 1000, plan)
            sampler.metrics()
            seconds[episodes] = [await play(sampler, episodes, repeat, plan) for repeat in range(plan.repeats)]
            counted = dict(sampler.metrics())
            print(f"sampler, {episodes}: {seconds[episodes]}", flush=True)
        later = counted["prompt_tokens"] - plan.repeats * episodes * plan.prompt
        return {"seconds": seconds, "cached_share_of_later_turns": round(counted["cached_tokens"] / later, 4)}
    finally:
        await sampler.aclose()


def engine_in_a_process(folder: Path, plan: argparse.Namespace) -> dict[int, list[float]]:
    """Seconds of the offline engine by concurrency, with the interpreter and the environment of the servers."""
    names = ("concurrency", "repeats", "turns", "prompt", "output", "observation", "server_args")
    given, out = folder / "plan.json", folder / "engine.json"
    given.write_text(json.dumps({"model": str(folder), **{name: getattr(plan, name) for name in names}}))
    script = str(Path(__file__).with_name("sglang_engine.py"))
    subprocess.run(
        [plan.python or sys.executable, script, str(given), str(out)], check=True, env={**os.environ, **plan.env}
    )
    return {int(episodes): seconds for episodes, seconds in json.loads(out.read_text()).items()}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="0.6b")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 64, 256, 1024])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of the first prompt")
    parser.add_argument("--output", type=int, default=128, help="tokens of each completion")
    parser.add_argument("--observation", type=int, default=32, help="tokens between turns")
    parser.add_argument("--server-args", type=json.loads, default={}, help="JSON")
    parser.add_argument("--env", type=json.loads, default={}, help="environment of the servers, JSON")
    parser.add_argument("--python", help="interpreter that has SGLang; default: this one")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / "sglang_throughput.json")
    return parser.parse_args()


def main() -> None:
    plan = parse()
    with tempfile.TemporaryDirectory() as name:
        folder = make_model(Path(name), plan.size)
        ours = asyncio.run(measure_sampler(folder, plan))
        engine = engine_in_a_process(folder, plan)
    rows = []
    print("| episodes at once | sampler, tokens/s | Engine.generate, tokens/s | ratio |\n|---:|---:|---:|---:|")
    for episodes in plan.concurrency:
        tokens = episodes * plan.turns * plan.output
        speed, reference = (tokens / statistics.median(by[episodes]) for by in (ours["seconds"], engine))
        print(f"| {episodes} | {speed:,.0f} | {reference:,.0f} | {speed / reference:.2f} |")
        rows.append({"episodes": episodes, "sampler": speed, "engine": reference, "ratio": speed / reference})
    print(f"cached share of the prompts of later turns: {ours['cached_share_of_later_turns']}")
    if plan.write:
        shown = {key: value for key, value in vars(plan).items() if key not in ("out", "write", "env")}
        result = {**describe(), "plan": shown, "rows": rows, **ours, "engine_seconds": engine}
        plan.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
