"""Tiny models of every family with weights that matter, and the same rows through `transformers` and Megatron."""

from __future__ import annotations

from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from relax_gym_trainers.megatron_learner import compat, hf, model
from relax_gym_trainers.megatron_learner.parallel import Layout

from megatron.core import parallel_state  # isort: skip
from megatron.core.distributed import (  # isort: skip
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.packed_seq_params import PackedSeqParams  # isort: skip
from megatron.core.pipeline_parallel import get_forward_backward_func  # isort: skip
from megatron.core.tensor_parallel import (  # isort: skip
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
)

assert compat
VOCABULARY = 131  # no multiple of 2
LENGTHS = [[5, 9, 3], [16, 2], [7], [4, 4, 11]]
"""Tokens of the rows of four micro-batches."""

DENSE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}
EXPERTS = DENSE | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
MIXTRAL = DENSE | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48, "sliding_window": None}

CONFIGS: dict[str, Any] = {
    "qwen3": lambda: transformers.Qwen3Config(**DENSE, tie_word_embeddings=False),
    "qwen3_tied": lambda: transformers.Qwen3Config(**DENSE, tie_word_embeddings=True),
    "qwen2": lambda: transformers.Qwen2Config(**{k: v for k, v in DENSE.items() if k != "head_dim"}),
    "llama": lambda: transformers.LlamaConfig(**DENSE),
    "mistral": lambda: transformers.MistralConfig(**DENSE, sliding_window=None),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**EXPERTS),
    "qwen3_moe_unnormalised": lambda: transformers.Qwen3MoeConfig(**EXPERTS | {"norm_topk_prob": False}),
    "mixtral": lambda: transformers.MixtralConfig(**MIXTRAL),
}


def write(config: PretrainedConfig, folder: Path, *, dtype: torch.dtype = torch.float32, **options: Any) -> None:
    """Save a model of random weights, norms and biases included."""
    whole: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.15 + (1.0 if "norm" in name else 0.0))
    whole.to(dtype).save_pretrained(folder, **options)


@cache
def row(micro_batch: int, number: int) -> Tensor:
    """Token ids [length]."""
    draw = torch.Generator().manual_seed(100 * micro_batch + number)
    return torch.randint(0, VOCABULARY, (LENGTHS[micro_batch][number],), generator=draw)


def rows(micro_batch: int) -> list[Tensor]:
    return [row(micro_batch, number) for number in range(len(LENGTHS[micro_batch]))]


def reference(folder: Path) -> tuple[list[list[Tensor]], dict[str, Tensor]]:
    """What `transformers` says row by row: logits [length, vocabulary], and the mean loss's gradients by hub name."""
    whole: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    logits = [[whole(ids[None]).logits[0] for ids in rows(j)] for j in range(len(LENGTHS))]
    losses = [
        F.cross_entropy(found[:-1], ids[1:], reduction="sum")
        for j in range(len(LENGTHS))
        for found, ids in zip(logits[j], rows(j), strict=True)
    ]
    count = sum(length - 1 for lengths in LENGTHS for length in lengths)
    (torch.stack(losses).sum() / count).backward()
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters()}
    return [[found.detach() for found in some] for some in logits], by_expert(gradients, whole)


def by_expert(tensors: dict[str, Tensor], whole: PreTrainedModel) -> dict[str, Tensor]:
    """The names of the hub, which has each expert apart, for those of `transformers` in memory."""
    mixtral = whole.config.model_type == "mixtral"
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    out = {}
    for name, tensor in tensors.items():
        name = name.replace(".mlp.", ".block_sparse_moe.") if mixtral else name
        head, _, last = name.rpartition(".")
        for expert, part in enumerate(tensor if last in ("gate_up_proj", "down_proj") and tensor.dim() == 3 else ()):
            if last == "down_proj":
                out[f"{head}.{expert}.{down}.weight"] = part
            else:
                out[f"{head}.{expert}.{gate}.weight"], out[f"{head}.{expert}.{up}.weight"] = part.chunk(2)
        if tensor.dim() != 3:
            out[name] = tensor
    return out


def zigzag(values: Tensor) -> Tensor:
    """This context-parallel rank's part of a row."""
    size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    chunks = values.chunk(2 * size)
    return values if size == 1 else torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])


def pack(micro_batch: int, layout: Layout) -> tuple[Tensor, Tensor, Tensor, Tensor, Any]:
    """ids, labels, whether a label counts and positions, each this rank's [t], and where rows begin."""
    parts: list[list[Tensor]] = [[], [], [], []]
    for ids in rows(micro_batch):
        pad = -len(ids) % layout.token_multiple
        counts = torch.ones(len(ids)).index_fill(0, torch.tensor(len(ids) - 1), 0.0)
        values = (ids, ids.roll(-1), counts)
        for part, value in zip(parts, [F.pad(value, (0, pad)) for value in values], strict=False):
            part.append(zigzag(value))
        parts[3].append(zigzag(torch.arange(len(ids) + pad)))
    lengths = [len(ids) + -len(ids) % layout.token_multiple for ids in rows(micro_batch)]
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        cu_seqlens_q_padded=starts,
        cu_seqlens_kv_padded=starts,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )
    ids, labels, counts, positions = (torch.cat(part) for part in parts)
    return ids, labels, counts, positions, packed


def logits_of(hidden: Tensor, weight: Tensor) -> Tensor:
    """[t, hidden] and this rank's rows of the head → logits [t, vocabulary] of all ranks, with their gradients."""
    group = parallel_state.get_tensor_model_parallel_group()
    hidden = copy_to_tensor_model_parallel_region(hidden, group)  # sums the gradients of the ranks' rows
    whole: Tensor = gather_from_tensor_model_parallel_region(hidden @ weight.T, group)
    return whole[:, :VOCABULARY]


def train_step(layout: Layout, folder: Path, wanted: list[list[Tensor]], options: dict[str, Any]) -> dict[str, Any]:
    """One forward and backward over all micro-batches → the worst difference of logits, and gradients by hub name."""
    config = transformers.AutoConfig.from_pretrained(folder)
    options = {"dtype": torch.float32, "calculate_per_token_loss": True} | options
    chunks = model.from_folder(folder, config, layout, **options)
    megatron = chunks[0].config
    wrapped = [DistributedDataParallel(megatron, DistributedDataParallelConfig(), chunk) for chunk in chunks]
    megatron.finalize_model_grads_func = finalize_model_grads
    worst = 0.0

    def forward(iterator: Any, chunk: Any) -> Any:
        number = next(iterator)
        ids, labels, counts, positions, packed = pack(number, layout)
        hidden = chunk(ids[None], positions[None], packed_seq_params=packed)

        def loss(hidden: Tensor, **_: Any) -> Any:
            nonlocal worst
            logits = logits_of(hidden, model.output_weight(chunks[-1])).float()
            padded = [F.pad(row, (0, 0, 0, -len(row) % layout.token_multiple)) for row in wanted[number]]
            want = torch.cat([zigzag(row) for row in padded])
            real = want.any(1)  # not what was padded
            worst = max(worst, float((logits - want).detach()[real].abs().max()))
            nll = F.cross_entropy(logits, labels, reduction="none")
            return (nll * counts).sum(), counts.sum().int(), {}

        return hidden, loss

    mine = [j for j in range(len(LENGTHS)) if j % layout.dp == parallel_state.get_data_parallel_rank()]
    iterators = [iter(mine) for _ in chunks]
    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iterators if layout.vpp > 1 else iterators[0],
        model=wrapped,
        num_microbatches=len(mine),
        seq_length=64,
        micro_batch_size=1,
        forward_only=False,
    )
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.copy_(parameter.main_grad)
    gradients = {name: tensor.clone() for name, tensor in hf.Export(chunks, config, bucket_bytes=1 << 14)}
    return {"logits": worst, "gradients": gradients}
