"""Random Qwen3 models on disk and what a sampler of them is built from, for the benchmarks of SGLang."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from relax_gym.config import RunConfig
from relax_gym.context import RunContext
from relax_gym.models import load_tokenizer
from relax_gym.testing import tiny_tokenizer

SIZES = {  # hidden, layers, heads, kv heads, intermediate, vocabulary
    "tiny": (64, 2, 4, 2, 128, 1024),
    "0.6b": (1024, 28, 16, 8, 3072, 151936),
    "4b": (2560, 36, 32, 8, 9728, 151936),
}


def make_model(folder: Path, size: str) -> Path:
    """A model of that shape in bfloat16 (the tiny one in float32), with a tokenizer and without any end token."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    hidden, layers, heads, kv_heads, intermediate, vocabulary = SIZES[size]
    config = Qwen3Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=intermediate,
        vocab_size=vocabulary,
        head_dim=16 if size == "tiny" else 128,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3ForCausalLM(config).to(torch.float32 if size == "tiny" else torch.bfloat16)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    return folder


def weights_of(folder: Path, device: str = "cpu") -> Iterator[tuple[str, Tensor]]:
    """The weights on disk, by name."""
    for file in sorted(folder.glob("*.safetensors")):
        yield from load_file(file, device=device).items()


def make_context(folder: Path, run_dir: Path) -> RunContext:
    """A run of nothing but this model."""
    config = RunConfig.model_validate(
        {
            "model": {"name": str(folder)},
            "env": [{"id": "bench/None-v0"}],
            "algorithm": {"name": "grpo"},
            "train": {"steps": 1, "groups_per_step": 1, "group_size": 2},
        }
    )
    return RunContext(config=config, run_dir=run_dir, model_path=folder, tokenizer=load_tokenizer(folder))
