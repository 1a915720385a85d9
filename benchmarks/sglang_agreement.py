"""How far log-probs of an SGLang server are from those of the torch learner in the same arithmetic.

Random models of Qwen3's and Qwen3-MoE's shape, whose logits have a standard deviation of 3.5; 64 completions of 128
tokens at each temperature, before and after a weight update. Differences are in nats. Controls: `stale` scores the same
tokens with the weights of after the update, as if it had not reached the server; `rounding` is how far the learner in
bfloat16 is from itself in float32. The mixture of experts is scored with the server's choice of experts and with the
learner's own; `same_experts` says how often the two choose the same ones in a layer.

    python benchmarks/sglang_agreement.py --write
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sglang_kit import finish, machine, make_sampler, parser, server_setup
from sglang_offline import random_ids
from shapes import DEVICE, GPU, SHAPES, build_model
from transformers import PreTrainedModel

from relax_gym.sampler import SamplingParams
from relax_gym.types import StopReason, TrainingSample
from relax_gym_plugins.samplers.sglang.sampler import SGLangSampler
from relax_gym_trainers.torch_learner.model import load_model
from relax_gym_trainers.torch_learner.packing import pack
from relax_gym_trainers.torch_learner.policy import Policy

PROMPT = 32
LOGIT_STD = 3.5
Samples = Sequence[TrainingSample]


async def sample(sampler: SGLangSampler, size: str, temperature: float, args: argparse.Namespace) -> Samples:
    """Completions as the learner gets them."""

    async def one(number: int) -> TrainingSample:
        session = sampler.open_session()
        prompt = random_ids(f"{number}", PROMPT, SHAPES[size].vocabulary)
        out = await session.generate(prompt, SamplingParams(max_new_tokens=args.tokens, temperature=temperature))
        session.close()
        if set(out.versions) != {sampler.version} or len(out.token_ids) != args.tokens:
            raise SystemExit(f"{len(out.token_ids)} tokens of versions {set(out.versions)}, not {args.tokens} of one")
        before, total = [0] * PROMPT, PROMPT + args.tokens
        return TrainingSample(
            episode_id=str(number),
            group_id=str(number),
            env_id="bench/None-v0",
            segment=0,
            token_ids=np.array([*prompt, *out.token_ids], dtype=np.int32),
            loss_mask=np.array([*before, *[1] * args.tokens], dtype=np.int8),
            logprobs=np.array([*before, *out.logprobs], dtype=np.float32),
            versions=np.array([*[-1] * PROMPT, *out.versions], dtype=np.int32),
            advantages=np.zeros(total, dtype=np.float32),
            turn_spans=((PROMPT, total),),
            turn_rewards=(0.0,),
            reward=0.0,
            stop_reason=StopReason.ENV_DONE,
            routed_experts=out.routed_experts,
        )

    return await asyncio.gather(*(one(number) for number in range(args.completions)))


@torch.no_grad()
def score(model: PreTrainedModel, samples: Samples, temperature: float, dtype: torch.dtype) -> tuple[Any, Any]:
    """Log-probs of all sampled tokens: the server's and the learner's."""
    policy = Policy(model, temperature=temperature, dtype=dtype, chunk=1024, share_prefix=False)
    batches = pack(samples, budget=4096, share_prefix=False)
    with policy.autocast():
        ours = torch.cat([policy.score(batch)[0].float().cpu() for batch in batches])
    for router in policy.replay.routers:
        router._forward_hooks.clear()  # the next policy of this model has its own
    return torch.cat([torch.from_numpy(batch.logprobs) for batch in batches]), ours


def difference(theirs: torch.Tensor, ours: torch.Tensor) -> dict[str, float]:
    """Mean and largest |difference|."""
    apart = (theirs - ours).abs()
    return {"mean": apart.mean().item(), "max": apart.max().item()}


def compare(model: PreTrainedModel, samples: Samples, temperature: float, dtype: torch.dtype) -> dict[str, Any]:
    """One row of the table."""
    theirs, ours = score(model, samples, temperature, dtype)
    row = {"mean_logprob": theirs.mean().item(), **difference(theirs, ours)}
    if samples[0].routed_experts is not None:
        unreplayed = [dataclasses.replace(one, routed_experts=None) for one in samples]
        row["own_experts"] = difference(*score(model, unreplayed, temperature, dtype))
        row["same_experts"] = same_experts(model, samples, dtype)
    elif dtype != torch.float32:
        row["rounding"] = difference(ours, score(model, samples, temperature, torch.float32)[1])
    return row


@torch.no_grad()
def same_experts(model: PreTrainedModel, samples: Samples, dtype: torch.dtype) -> float:
    """Share of (token, layer) for which server and learner choose the same set of experts."""
    chosen: list[Any] = []
    routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
    hooks = [router.register_forward_hook(lambda _m, _i, out: chosen.append(out[2].cpu())) for router in routers]
    same = []
    for one in samples:
        chosen.clear()
        with torch.autocast(model.device.type, dtype=dtype, enabled=dtype != torch.float32):
            model(torch.from_numpy(one.token_ids[None, :-1]).long().to(model.device), use_cache=False)
        own = torch.stack(chosen, 1).numpy()  # [tokens - 1, layers, top_k]
        assert one.routed_experts is not None and one.routed_experts.shape == own.shape
        same.append((np.sort(own) == np.sort(one.routed_experts)).all(-1))
    for hook in hooks:
        hook.remove()
    return float(np.mean(same))


@torch.no_grad()
def perturb(model: PreTrainedModel, amount: float) -> None:
    """Add noise to every tensor, in units of its mean size."""
    for parameter in model.parameters():
        parameter += amount * parameter.abs().mean() * torch.randn_like(parameter)


async def measure(size: str, folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows of one model."""
    dtype = getattr(torch, args.dtype)
    path = build_model(size, folder / "model", dtype, logit_std=LOGIT_STD)
    model = load_model(path, trust_remote_code=False).to(DEVICE)
    experts = bool(SHAPES[size].experts)
    sampler = make_sampler(path, folder, args, ours(), sync="ipc", routed_experts=experts)
    rows: list[dict[str, Any]] = []
    try:
        await sampler.start()
        for version in range(2):
            await sampler.update_weights(model.named_parameters(), version)
            for temperature in args.temperatures:
                samples = await sample(sampler, size, temperature, args)
                row = compare(model, samples, temperature, dtype)
                rows.append({"model": size, "dtype": args.dtype, "version": version, "temperature": temperature, **row})
            if not version:
                perturb(model, args.noise)
                for row, temperature in zip(rows, args.temperatures, strict=True):
                    fresh = await sample(sampler, size, temperature, args)
                    row["stale"] = difference(*score(model, fresh, temperature, dtype))
    finally:
        await sampler.aclose()
    return rows


def ours() -> dict[str, Any]:
    """Arguments of servers: on a GPU, leave room for the learner."""
    return {"mem_fraction_static": 0.5} if GPU else {}


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    print("| model | weights | temperature | mean log-prob | mean, max difference | controls: mean, max |")
    print("|---|---:|---:|---:|---:|---|")
    for r in rows:
        controls = [f"{name} {r[name]['mean']:.1e}, {r[name]['max']:.1e}" for name in CONTROLS if name in r]
        controls += [f"same experts {r['same_experts']:.4f}"] if "same_experts" in r else []
        cells = [r["model"], r["version"], r["temperature"], f"{r['mean_logprob']:.2f}"]
        print("|", " | ".join(map(str, [*cells, f"{r['mean']:.1e}, {r['max']:.1e}", "; ".join(controls)])), "|")


CONTROLS = ("stale", "rounding", "own_experts")


def main() -> None:
    """Measure each model, print and, when asked, write."""
    made = parser(__doc__)
    made.add_argument("--sizes", nargs="+", default=["0.6b", "moe"], choices=SHAPES)
    made.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 0.7])
    made.add_argument("--completions", type=int, default=64)
    made.add_argument("--tokens", type=int, default=128, help="of a completion")
    made.add_argument("--noise", type=float, default=0.1, help="of the update, in units of each tensor's mean size")
    args = made.parse_args()
    rows = []
    for size in args.sizes:
        with tempfile.TemporaryDirectory() as folder:
            rows += asyncio.run(measure(size, Path(folder), args))
    result = {**machine(args, server_setup(args, **ours())[0]), "rows": rows}
    show(rows)
    finish(result, "sglang_agreement", args)


if __name__ == "__main__":
    main()
