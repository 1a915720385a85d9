"""Shapes of models for benchmarks: that of Qwen3 with random weights, and nothing that ends a completion early: no
end-of-sequence token in the config, the generation config or the tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

GPU = torch.cuda.is_available()
DEVICE = "cuda:0" if GPU else "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a Qwen3, or with `experts` of a Qwen3-MoE, whose `intermediate` is that of an expert. `head_dim` is that
    of attention."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int = 151_936
    head_dim: int = 128
    experts: int = 0
    experts_per_token: int = 4


SHAPES = {
    "0.6b": Shape(hidden=1024, layers=28, heads=16, kv_heads=8, intermediate=3072),
    "4b": Shape(hidden=2560, layers=36, heads=32, kv_heads=8, intermediate=9728),
    "0.2b": Shape(hidden=1024, layers=16, heads=16, kv_heads=8, intermediate=3072, vocabulary=32_000, head_dim=64),
    "tiny": Shape(hidden=64, layers=3, heads=4, kv_heads=2, intermediate=192, vocabulary=512, head_dim=16),
    "moe": Shape(
        hidden=512, layers=6, heads=8, kv_heads=4, intermediate=256, vocabulary=32_000, head_dim=64, experts=32
    ),
    "a3b-8": Shape(  # 8 layers with half the experts of Qwen3-30B-A3B
        hidden=2048, layers=8, heads=32, kv_heads=4, intermediate=768, experts=64, experts_per_token=8
    ),
    "tiny-moe": Shape(
        hidden=64, layers=3, heads=4, kv_heads=2, intermediate=32, vocabulary=512, head_dim=16, experts=8
    ),
}


def build_model(size: str, folder: Path, dtype: torch.dtype, *, logit_std: float | None = None) -> Path:
    """Write model and tokenizer; the folder. A random model is nearly uniform over its vocabulary; `logit_std` gives it
    a head of its own, not tied to the embeddings, whose logits are so far from their mean."""
    shape = SHAPES[size]
    experts = {
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "moe_intermediate_size": shape.intermediate,
        "norm_topk_prob": True,
    }
    config = AutoConfig.for_model(
        "qwen3_moe" if shape.experts else "qwen3",
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=8192,
        tie_word_embeddings=logit_std is None,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **(experts if shape.experts else {}),
    )
    torch.manual_seed(0)
    with torch.device(DEVICE), torch.no_grad():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        if logit_std is not None:
            model.get_output_embeddings().weight.normal_(0, logit_std / shape.hidden**0.5)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder, max_shard_size="100GB")
    write_tokenizer(shape.vocabulary, folder)
    return folder


def write_tokenizer(size: int, folder: Path) -> None:
    """One word for each id, no special tokens."""
    tokenizer = Tokenizer(models.WordLevel({f"t{id}": id for id in range(size)}, unk_token="t0"))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def training_flops(shape: Shape, rows: int, prompt: int, completion: int) -> float:
    """What forward and backward of rows need whose completions are trained; see `megatron_step.py`."""
    length = prompt + completion - 1  # nothing is predicted from the last token
    attention = 2 * shape.hidden * (shape.heads + shape.kv_heads) * shape.head_dim
    mlp = 3 * shape.hidden * shape.intermediate
    if shape.experts:
        mlp = mlp * shape.experts_per_token + shape.hidden * shape.experts
    weights = shape.layers * (attention + mlp) * length + shape.vocabulary * shape.hidden * completion
    return 6.0 * rows * (weights + shape.layers * shape.heads * shape.head_dim * length**2)
