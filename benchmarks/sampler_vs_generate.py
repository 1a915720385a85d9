"""Tokens per second of the local sampler against `transformers`' generate, in one process, alternating.

Two workloads on a model of SmolLM2-135M's shape with random weights, sampled at temperature 1:
  fixed     32 unrelated prompts of 64 tokens, 32 new tokens each, no stop token
  episodes  4 groups of 8 episodes with one prompt of 128 tokens for each group; two turns of up to 48 tokens that end
            at a stop token; the environment adds 24 tokens between them. `generate` reads whole prompts each turn.

    python benchmarks/sampler_vs_generate.py --write
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import describe
from transformers import LlamaConfig, LlamaForCausalLM

from relax_gym.sampler import SamplingParams, Session
from relax_gym_plugins.samplers.local.engine import LocalEngine
from relax_gym_plugins.samplers.local.options import LocalSamplerOptions
from relax_gym_plugins.samplers.local.sampler import LocalSampler

VOCABULARY = 49_152
STOP_IDS = tuple(range(VOCABULARY // 16))
RESULT = Path(__file__).parent / "results" / "sampler_vs_generate_cpu.json"
Prompts = list[list[int]]


def build_model(dtype: torch.dtype) -> LlamaForCausalLM:
    """SmolLM2-135M's shape, random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def random_ids(seed: int, length: int) -> list[int]:
    """Token ids of a prompt."""
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist()


def grow(prompt: list[int], answer: list[int], episode: int) -> list[int]:
    """The second turn's prompt."""
    return [*prompt, *answer, *random_ids(1000 + episode, 24)]


def generate(model: LlamaForCausalLM, prompts: Prompts, new: int, stop: tuple[int, ...]) -> Prompts:
    """One `generate` call on a left-padded batch; the new ids of each prompt up to its stop token."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    ending: dict[str, Any] = {"eos_token_id": list(stop)} if stop else {"eos_token_id": None}
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=new,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            pad_token_id=0,
            **ending,
        )
    rows, stopping = out[:, width:].tolist(), set(stop)
    ends = [next((i + 1 for i, token in enumerate(row) if token in stopping), len(row)) for row in rows]
    return [row[:end] for row, end in zip(rows, ends, strict=True)]


async def play(session: Session, prompt: list[int], new: int, turns: int, stop: tuple[int, ...], episode: int) -> int:
    """One episode through the sampler; returns how many tokens it sampled."""
    count = 0
    for turn in range(turns):
        params = SamplingParams(max_new_tokens=new, stop_token_ids=stop, seed=2 * episode + turn)
        out = await session.generate(prompt, params)
        count += len(out.token_ids)
        prompt = grow(prompt, list(out.token_ids), episode)
    session.close()
    return count


def with_sampler(sampler: LocalSampler, prompts: Prompts, new: int, turns: int, stop: tuple[int, ...]) -> int:
    """All episodes side by side through the sampler; returns the number of sampled tokens."""

    async def run() -> int:
        sessions = [sampler.open_session() for _ in prompts]
        jobs = [play(s, p, new, turns, stop, i) for i, (s, p) in enumerate(zip(sessions, prompts, strict=True))]
        return sum(await asyncio.gather(*jobs))

    return asyncio.run(run())


def with_generate(model: LlamaForCausalLM, prompts: Prompts, new: int, turns: int, stop: tuple[int, ...]) -> int:
    """The same with one `generate` call for each turn of the whole batch."""
    count = 0
    for _ in range(turns):
        answers = generate(model, prompts, new, stop)
        count += sum(map(len, answers))
        prompts = [grow(p, a, i) for i, (p, a) in enumerate(zip(prompts, answers, strict=True))]
    return count


def rate(run: Callable[[], int]) -> float:
    """Tokens per second of one run."""
    begin = time.perf_counter()
    count = run()
    return count / (time.perf_counter() - begin)


def compare(sampler: LocalSampler, model: LlamaForCausalLM, workload: tuple[Any, ...], repeats: int) -> dict[str, Any]:
    """Medians of alternating repeats after one warm-up of each."""
    ours, theirs = [], []
    for repeat in range(repeats + 1):
        pair = rate(lambda: with_sampler(sampler, *workload)), rate(lambda: with_generate(model, *workload))
        if repeat:
            ours.append(round(pair[0], 1))
            theirs.append(round(pair[1], 1))
    return {
        "sampler_tokens_per_second": ours,
        "generate_tokens_per_second": theirs,
        "ratio_of_medians": round(statistics.median(ours) / statistics.median(theirs), 2),
    }


def main() -> None:
    """Run both workloads in each dtype and print (or write) the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"], choices=["bfloat16", "float32"])
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name} into benchmarks/results")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    result: dict[str, Any] = {**describe(), "threads": args.threads}
    workloads = {
        "fixed": ([random_ids(i, 64) for i in range(32)], 32, 1, ()),
        "episodes": ([random_ids(i // 8, 128) for i in range(32)], 48, 2, STOP_IDS),
    }
    for name in args.dtype:
        model = build_model(getattr(torch, name))
        engine = LocalEngine(copy.deepcopy(model), options=LocalSamplerOptions())
        sampler = LocalSampler.from_engine(engine)
        asyncio.run(sampler.start())
        result[name] = {key: compare(sampler, model, load, args.repeats) for key, load in workloads.items()}
        asyncio.run(sampler.aclose())
    text = json.dumps(result, indent=2)
    print(text)
    if args.write:
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
