"""What replaying the sampler's experts costs the Megatron learner, as a share of a step's time, in one process.

A step is a GRPO update: packing, forward, backward, optimizer. Steps with experts and without alternate. The experts
are those that the model chooses itself and the learning rate is 0, so that both kinds do the same work and find the
same gradient; both norms are reported. Weights are random: on a GPU in the shape of Qwen3-30B-A3B with half the experts
and a quarter of the layers (bfloat16; `--layers 6` for a card of 80 GB), tiny on a CPU (float32).

    OMP_WAIT_POLICY=passive python benchmarks/router_replay.py --write
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import describe, installed
from torch import Tensor
from transformers import Qwen3MoeConfig

from relax_gym.config import RunConfig, load_algorithms
from relax_gym.types import StopReason, TrainingSample
from relax_gym_trainers.megatron_learner import model, parallel
from relax_gym_trainers.megatron_learner.backend import Head, MegatronBackend
from relax_gym_trainers.megatron_learner.optimizer import add_up, apply_gradient, build_optimizer, wrap
from relax_gym_trainers.megatron_learner.options import MegatronLearnerOptions
from relax_gym_trainers.megatron_learner.parallel import Layout
from relax_gym_trainers.megatron_learner.rank import RECOMPUTE
from relax_gym_trainers.torch_learner.objectives import Objective
from relax_gym_trainers.torch_learner.packing import UNROUTED
from relax_gym_trainers.torch_learner.update import Tally

GPU = torch.cuda.is_available()
DTYPE = torch.bfloat16 if GPU else torch.float32
SHAPE: dict[str, Any] = (
    {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151_936}
    if GPU
    else {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 1024}
)
EXPERTS: dict[str, Any] = (
    {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    if GPU
    else {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 64}
)
DEFAULTS = {"layers": 12, "samples": 32, "length": 2048} if GPU else {"layers": 4, "samples": 8, "length": 256}
SHARE_OF_PROMPT = 4
GOAL = 0.019
RESULTS = Path(__file__).parent / "results" / f"router_replay_{'gpu' if GPU else 'cpu'}.json"


class Stepper:
    """A learner of one process with random weights."""

    def __init__(self, layers: int, budget: int, recompute: str) -> None:
        shape = Qwen3MoeConfig(
            **SHAPE, **EXPERTS, num_hidden_layers=layers, norm_topk_prob=True, mlp_only_layers=[], decoder_sparse_step=1
        )
        options = MegatronLearnerOptions(micro_batch_tokens=budget, recompute=recompute)
        more = {"calculate_per_token_loss": True, **RECOMPUTE[recompute]}
        chunks = wrap(filled(model.build(shape, Layout(), DTYPE, **more)), options)
        self.parameters = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
        self.optimizer = build_optimizer(chunks, options, DTYPE)
        head = Head(vocabulary=shape.vocab_size, temperature=1.0, never=(), chunk=options.logprob_chunk, dtype=DTYPE)
        self.backend = MegatronBackend(chunks, Layout(), options, head)
        train = {"steps": 1, "groups_per_step": 1, "group_size": 2}
        config = RunConfig.model_validate({"model": {"name": "none"}, "env": [{"id": "test/None-v0"}], "train": train})
        (algorithm,) = load_algorithms(config)
        self.objective = Objective(algorithm=algorithm, distiller=None, loss_weight=1.0, backend=self.backend)

    def step(self, samples: Sequence[TrainingSample]) -> tuple[float, float]:
        """One update that changes no weight: its seconds and the norm of its gradient."""
        wait()
        begin = time.perf_counter()
        self.backend.begin()
        piece = self.objective.piece(samples, samples, only=True)
        self.backend.accumulate(piece, tally=Tally(), first=True, step=1)
        add_up(self.backend.chunks)
        norm = apply_gradient(self.optimizer, lr=0.0, clip=1.0, step=1)
        wait()
        return time.perf_counter() - begin, norm

    def record(self, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
        """The samples with the model's log-probs and choice of experts."""
        routers = [module for module in self.backend.chunks[0].modules() if hasattr(module, "router_replay")]
        maps: list[list[Tensor]] = [[] for _ in routers]

        def hook(place: int) -> Any:
            return lambda router, inputs, output: maps[place].append(output[1].nonzero()[:, 1].view(-1, router.topk))

        hooks = [router.register_forward_hook(hook(place)) for place, router in enumerate(routers)]
        part = self.objective.part(samples, skip_flat=False)
        scores = self.backend.score_all(part.micro_batches)
        for one in hooks:
            one.remove()
        found = []
        for batch, logprobs, *chosen in zip(part.micro_batches, scores, *maps, strict=True):
            experts = torch.stack(chosen, dim=1).cpu().numpy()
            ends = np.cumsum(batch.token_counts)[:-1]
            for number, (member, own) in enumerate(
                zip(batch.members, np.split(logprobs.cpu().numpy(), ends), strict=True)
            ):
                rows = experts[batch.cu_seqlens[number] : batch.cu_seqlens[number + 1]]
                found.append(recorded(member, own, rows))
        return found


def filled(chunks: list[model.LanguageModel]) -> list[model.LanguageModel]:
    """The chunks with random weights."""
    torch.manual_seed(0)
    with torch.no_grad():
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                parameter.fill_(1.0) if "norm" in name else parameter.normal_(std=0.02)
    return chunks


def recorded(sample: TrainingSample, logprobs: Any, rows: Any) -> TrainingSample:
    """The sample with log-probs of its trained tokens, and experts of the tokens that the model has read."""
    whole = np.zeros(len(sample.token_ids), dtype=np.float32)
    whole[sample.loss_mask == 1] = logprobs
    experts = np.full((len(whole) - 1, *rows.shape[1:]), UNROUTED, dtype=np.int32)
    experts[: len(rows)] = rows[: len(experts)]
    return dataclasses.replace(sample, logprobs=whole, routed_experts=experts)


def random_samples(count: int, length: int) -> list[TrainingSample]:
    """Samples of `length` tokens, the first of which are prompt; advantages 1 and -1 in turn."""
    rng = np.random.default_rng(0)
    prompt = length // SHARE_OF_PROMPT
    mask = (np.arange(length) >= prompt).astype(np.int8)
    return [
        TrainingSample(
            episode_id=f"e{number}",
            group_id=f"g{number // 8}",
            env_id="test/None-v0",
            segment=0,
            token_ids=rng.integers(0, SHAPE["vocab_size"], length).astype(np.int32),
            loss_mask=mask,
            logprobs=-1.0 * mask.astype(np.float32),
            versions=np.where(mask, 0, -1).astype(np.int32),
            advantages=(mask * (-1.0) ** number).astype(np.float32),
            turn_spans=((prompt, length),),
            turn_rewards=(0.0,),
            reward=0.0,
            stop_reason=StopReason.ENV_DONE,
        )
        for number in range(count)
    ]


def wait() -> None:
    """Until the device has done what it was told."""
    if GPU:
        torch.cuda.synchronize()


def measure(stepper: Stepper, ways: dict[str, Sequence[TrainingSample]], repeats: int) -> dict[str, Any]:
    """Seconds of both kinds of step, alternating, after two warm-ups of each that compare them."""
    norms = {}
    for _ in range(2):
        norms = {way: stepper.step(samples)[1] for way, samples in ways.items()}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for repeat in range(repeats):
        for way in ways if repeat % 2 else reversed(ways):
            seconds[way].append(stepper.step(ways[way])[0])
    pairs = [with_ / without for with_, without in zip(seconds["replay"], seconds["plain"], strict=True)]
    median = {way: statistics.median(values) for way, values in seconds.items()}
    return {
        "median": median,
        "overhead": median["replay"] / median["plain"] - 1,
        "overhead_of_pairs": statistics.median(pairs) - 1,
        "goal": GOAL,
        "gradient_norms": norms,
        "seconds": seconds,
    }


def main() -> None:
    """Measure, print and, when asked, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=DEFAULTS["layers"])
    parser.add_argument("--samples", type=int, default=DEFAULTS["samples"], help="of one step")
    parser.add_argument("--length", type=int, default=DEFAULTS["length"], help="tokens of a sample")
    parser.add_argument("--tokens", type=int, nargs="+", help="of a micro-batch; one row of results for each")
    parser.add_argument("--recompute", choices=sorted(RECOMPUTE), default="none")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.parent.name}/{RESULTS.name}")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(arguments.threads)
    budgets = arguments.tokens or [4 * arguments.length, 8 * arguments.length]
    with tempfile.TemporaryDirectory() as folder:
        kind = "cpu:gloo,cuda:nccl" if GPU else "gloo"
        parallel.initialise(Layout(), 0, f"file://{folder}/meeting", kind, seed=0)
        stepper = Stepper(arguments.layers, budgets[0], arguments.recompute)
        rows = []
        for budget in budgets:
            stepper.backend.options = stepper.backend.options.model_copy(update={"micro_batch_tokens": budget})
            plain = stepper.record(random_samples(arguments.samples, arguments.length))
            ways = {"replay": plain, "plain": [dataclasses.replace(one, routed_experts=None) for one in plain]}
            rows.append({"micro_batch_tokens": budget, **measure(stepper, ways, arguments.repeats)})
            print({name: value for name, value in rows[-1].items() if name != "seconds"}, flush=True)
        parallel.destroy()
    result = {
        **describe(),
        "megatron-core": installed("megatron-core"),
        "dtype": str(DTYPE).removeprefix("torch."),
        "threads": arguments.threads,
        "shape": {**SHAPE, **EXPERTS, "num_hidden_layers": arguments.layers, "parameters": stepper.parameters},
        "samples": arguments.samples,
        "length": arguments.length,
        "recompute": arguments.recompute,
        **({"peak_bytes": torch.cuda.max_memory_allocated()} if GPU else {}),
        "rows": rows,
    }
    if arguments.write:
        RESULTS.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
