"""Time and memory of the Megatron learner's own modules beside what they replace, forward and backward, in one process.

Experts: all in grouped products, beside megatron-core's loop over experts. Attention: rows of a pack, beside
megatron-core's attention without Transformer Engine, which cannot pack and gets the rows padded to the longest.
Log-probs: of chunks of tokens, beside log_softmax over the logits of all tokens. On a GPU in bfloat16 at the shapes of
Qwen3-30B-A3B on 8 expert-parallel ranks and of Qwen3-4B, else in float32 at small ones.

    OMP_WAIT_POLICY=passive python benchmarks/megatron_modules.py --write
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from machine import describe, installed
from torch import Tensor

from relax_gym_trainers.megatron_learner import compat, parallel
from relax_gym_trainers.megatron_learner.logprobs import vocab_parallel_logprobs
from relax_gym_trainers.megatron_learner.modules import flash, grouped
from relax_gym_trainers.megatron_learner.modules.attention import CoreAttention
from relax_gym_trainers.megatron_learner.modules.experts import GroupedExperts, unstacked

from megatron.core import parallel_state  # isort: skip
from megatron.core.packed_seq_params import PackedSeqParams  # isort: skip
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear  # isort: skip
from megatron.core.transformer import TransformerConfig  # isort: skip
from megatron.core.transformer.dot_product_attention import DotProductAttention  # isort: skip
from megatron.core.transformer.enums import AttnMaskType  # isort: skip
from megatron.core.transformer.mlp import MLPSubmodules  # isort: skip
from megatron.core.transformer.moe.experts import SequentialMLP  # isort: skip

GPU = torch.cuda.is_available()
DTYPE, DEVICE = (torch.bfloat16, "cuda") if GPU else (torch.float32, "cpu")
EXPERTS: list[dict[str, int]] = (
    [{"experts": n, "rows": 65_536, "hidden": 2048, "width": 768} for n in (16, 128)]
    if GPU
    else [{"experts": n, "rows": 2048, "hidden": 256, "width": 128} for n in (8, 64)]
)
ROWS = {"even": [4096] * 2, "uneven": [2048, *[128] * 16]} if GPU else {"even": [256] * 2, "uneven": [256, *[32] * 8]}
HEADS = {"heads": 32, "groups": 8, "size": 128} if GPU else {"heads": 8, "groups": 2, "size": 64}
HEAD = (
    {"tokens": 8192, "vocabulary": 151_936, "hidden": 2560}
    if GPU
    else {"tokens": 1024, "vocabulary": 32_000, "hidden": 64}
)
CHUNK = 1024
RESULTS = Path(__file__).parent / "results" / f"megatron_modules_{'gpu' if GPU else 'cpu'}.json"


def config(**options: Any) -> Any:
    """One layer; as the learner sets it where that matters for time."""
    fixed = {"num_layers": 1, "add_bias_linear": False, "attention_dropout": 0.0, "hidden_dropout": 0.0}
    gated = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "bias_activation_fusion": True}
    return TransformerConfig(
        **fixed,
        **gated,
        params_dtype=DTYPE,
        bf16=GPU,
        use_cpu_initialization=not GPU,
        normalization="RMSNorm",
        **options,
    )


def experts_case(experts: int, rows: int, hidden: int, width: int) -> dict[str, Callable[[], list[Tensor]]]:
    """Forward and backward of both kinds with the same weights; half the experts get most rows, one gets none."""
    options = config(
        hidden_size=hidden,
        num_attention_heads=1,
        ffn_hidden_size=width,
        num_moe_experts=experts,
        moe_ffn_hidden_size=width,
        moe_router_topk=2,
    )
    groups = SimpleNamespace(
        ep=parallel_state.get_expert_model_parallel_group(),
        expt_tp=parallel_state.get_expert_tensor_parallel_group(),
        expt_dp=parallel_state.get_expert_data_parallel_group(),
    )
    linear = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    modules = {
        "ours": GroupedExperts(experts, options, pg_collection=groups).to(DEVICE),
        "theirs": SequentialMLP(experts, options, linear, pg_collection=groups).to(DEVICE),
    }
    stacked = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"experts": modules["ours"]})})
    parts = {name.removeprefix("mlp.experts."): part for name, part in unstacked(stacked.named_parameters())}
    with torch.no_grad():
        for name, parameter in modules["theirs"].named_parameters():
            parameter.copy_(parts[name])
    share = torch.ones(experts)
    share[::2], share[-1] = 3.0, 0.0
    counts = (share / share.sum() * rows).long()
    counts[0] += rows - counts.sum()
    x = torch.randn(rows, hidden, dtype=DTYPE, device=DEVICE, requires_grad=True)
    weights = torch.rand(rows, device=DEVICE, requires_grad=True)
    upstream = torch.randn_like(x)

    def step(module: Any) -> list[Tensor]:
        module.zero_grad(set_to_none=True)
        out, _ = module(x, counts, weights)
        return [out.detach(), *torch.autograd.grad(out, [x, weights, *module.parameters()], upstream)[:2]]

    return {way: lambda module=module: step(module) for way, module in modules.items()}


def attention_case(lengths: list[int]) -> dict[str, Callable[[], list[Tensor]]]:
    """The same rows packed, and padded to the longest."""
    heads, groups, size = HEADS["heads"], HEADS["groups"], HEADS["size"]
    options = config(hidden_size=heads * size, num_attention_heads=heads, num_query_groups=groups)
    context = parallel_state.get_context_parallel_group()
    collection = SimpleNamespace(cp=context, tp=parallel_state.get_tensor_model_parallel_group())
    given = {"attn_mask_type": AttnMaskType.causal, "attention_type": "self", "pg_collection": collection}
    ours, theirs = CoreAttention(options, 1, **given), DotProductAttention(options, 1, **given)
    packed = [
        torch.randn(sum(lengths), n, size, dtype=DTYPE, device=DEVICE, requires_grad=True)
        for n in (heads, groups, groups)
    ]
    starts = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    pack = PackedSeqParams("thd", starts, starts, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths))
    padded = [
        torch.nn.utils.rnn.pad_sequence(list(x.detach().split(lengths))).contiguous().requires_grad_() for x in packed
    ]
    later = torch.ones(max(lengths), max(lengths), dtype=torch.bool, device=DEVICE).triu(1)[None, None]
    real = torch.nn.utils.rnn.pad_sequence([torch.ones(n, dtype=torch.bool, device=DEVICE) for n in lengths]).T

    def step_ours() -> list[Tensor]:
        out = ours(*packed, packed_seq_params=pack).flatten(1)
        return [out.detach(), *(x.flatten(1) for x in torch.autograd.grad(out, packed, torch.ones_like(out)))]

    def step_theirs() -> list[Tensor]:
        out = theirs(*padded, later, attn_mask_type=AttnMaskType.causal)
        grads = torch.autograd.grad(out, padded, real.T[..., None].expand_as(out).to(out.dtype).contiguous())
        return [x.flatten(2).transpose(0, 1)[real] for x in (out.detach(), *grads)]

    return {"ours": step_ours, "theirs": step_theirs}


def logprobs_case(tokens: int, vocabulary: int, hidden: int) -> dict[str, Callable[[], list[Tensor]]]:
    """Log-prob and entropy of each token, the entropy without a gradient; gradients of hidden states and head."""
    states = torch.randn(tokens, hidden, dtype=DTYPE, device=DEVICE, requires_grad=True)
    weight = torch.randn(vocabulary, hidden, dtype=DTYPE, device=DEVICE).mul_(hidden**-0.5).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), device=DEVICE)
    factors = torch.linspace(-1, 1, tokens, device=DEVICE)

    def step(scored: tuple[Tensor, Tensor]) -> list[Tensor]:
        grads = torch.autograd.grad(scored[0] @ factors, (states, weight))
        return [scored[0].detach(), scored[1].detach(), grads[0]]

    def ours() -> list[Tensor]:
        settings = {"temperature": 1.0, "vocabulary": vocabulary, "chunk": CHUNK, "dtype": DTYPE}
        return step(vocab_parallel_logprobs(states, weight, targets, **settings))

    def theirs() -> list[Tensor]:
        log_p = (states @ weight.T).float().log_softmax(-1)
        with torch.no_grad():
            entropy = -(log_p.exp() * log_p).sum(-1)
        return step((log_p.gather(-1, targets[:, None])[:, 0], entropy))

    return {"ours": ours, "theirs": theirs}


def measure(ways: dict[str, Callable[[], list[Tensor]]], repeats: int) -> dict[str, Any]:
    """Seconds of both, alternating, after a warm-up that compares them; on a GPU also the bytes at their peaks."""
    found = {way: step() for way, step in ways.items()}
    pairs = zip(found["ours"], found["theirs"], strict=True)
    error = max(float((a - b).float().abs().max() / b.float().abs().max()) for a, b in pairs)
    del found, pairs
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    peaks = {}
    for repeat in range(repeats):
        for way in ways if repeat % 2 else reversed(ways):
            if GPU:
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                torch.cuda.synchronize()
            begin = time.perf_counter()
            ways[way]()
            if GPU:
                torch.cuda.synchronize()
                peaks[way] = torch.cuda.max_memory_allocated() - before
            seconds[way].append(time.perf_counter() - begin)
    median = {way: statistics.median(values) for way, values in seconds.items()}
    row = {"seconds": seconds, "median": median, "speedup": median["theirs"] / median["ours"], "difference": error}
    return {**row, **({"peak_bytes": peaks} if peaks else {})}


def cases() -> list[tuple[str, dict[str, Any], Callable[[], dict[str, Callable[[], list[Tensor]]]]]]:
    """(module, shape, what makes its two ways)."""
    return [
        *(("experts", shape, lambda shape=shape: experts_case(**shape)) for shape in EXPERTS),
        *(("attention", {"rows": n, **HEADS}, lambda n=n: attention_case(n)) for n in ROWS.values()),
        ("logprobs", HEAD, lambda: logprobs_case(**HEAD)),
    ]


def main() -> None:
    """Measure, print and, when asked, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.parent.name}/{RESULTS.name}")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(arguments.threads)
    compat.prepare()
    with tempfile.TemporaryDirectory() as folder:
        parallel.initialise(parallel.Layout(), 0, f"file://{folder}/meeting", "nccl" if GPU else "gloo")
        rows = []
        for module, shape, make in cases():
            rows.append({"module": module, "shape": shape, **measure(make(), arguments.repeats)})
            print({key: rows[-1][key] for key in ("module", "shape", "median", "speedup", "difference")}, flush=True)
        parallel.destroy()
    probe = torch.zeros(16, 16, dtype=DTYPE, device=DEVICE)
    result = {
        **describe(),
        "megatron-core": installed("megatron-core"),
        "dtype": str(DTYPE).removeprefix("torch."),
        "threads": arguments.threads,
        "chunk": CHUNK,
        "grouped_kernel": grouped.has_kernel(probe, probe[None]),
        "flash_kernel": flash.can_attend_packed(*[probe[None].expand(1, 16, 16)] * 3),
        "rows": rows,
    }
    if arguments.write:
        RESULTS.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
