"""Models, samplers and arguments that the SGLang benchmarks share.

Models have the shape of Qwen3 and random weights, and nothing that ends a completion early: no end-of-sequence token in
the config, the generation config or the tokenizer.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from machine import describe
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from relax_gym.config import RunConfig
from relax_gym.context import RunContext
from relax_gym.models import load_tokenizer
from relax_gym_plugins.samplers.sglang.options import SGLangSamplerOptions
from relax_gym_plugins.samplers.sglang.sampler import SGLangSampler

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
GPU = torch.cuda.is_available()
DEVICE = "cuda:0" if GPU else "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a Qwen3, or with `experts` of a Qwen3-MoE. `head_dim` is that of attention."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int = 151_936
    head_dim: int = 128
    experts: int = 0


SHAPES = {
    "0.6b": Shape(hidden=1024, layers=28, heads=16, kv_heads=8, intermediate=3072),
    "4b": Shape(hidden=2560, layers=36, heads=32, kv_heads=8, intermediate=9728),
    "tiny": Shape(hidden=64, layers=3, heads=4, kv_heads=2, intermediate=192, vocabulary=512, head_dim=16),
    "moe": Shape(
        hidden=512, layers=6, heads=8, kv_heads=4, intermediate=256, vocabulary=32_000, head_dim=64, experts=32
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
        "num_experts_per_tok": 4,
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


def read_weights(folder: Path, device: str = DEVICE) -> dict[str, torch.Tensor]:
    """The tensors of a model, under the names of its checkpoint."""
    return load_file(folder / "model.safetensors", device=device)


def parser(doc: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """Arguments that all SGLang benchmarks have."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--python", default=sys.executable, help="interpreter that has SGLang; default: this one")
    made.add_argument(
        "--server-args", type=json.loads, default={}, metavar="JSON", help="arguments of SGLang, as JSON; over ours"
    )
    made.add_argument("--dtype", default="bfloat16" if GPU else "float32", choices=["bfloat16", "float32"])
    made.add_argument("--write", action="store_true", help="write the result into benchmarks/results")
    made.add_argument("--out", type=Path, help="write the result into this file")
    made.set_defaults(**defaults)
    return made


def server_setup(args: argparse.Namespace, **ours: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Arguments and environment of servers: without a GPU those of the tests, then ours, then the user's."""
    kit = {} if GPU else runpy.run_path(str(ROOT / "tests/sglang_kit.py"))
    arguments = {**kit.get("CPU_ARGUMENTS", {}), **ours, "dtype": args.dtype, **args.server_args}
    return arguments, kit.get("CPU_ENVIRONMENT", {})


def make_sampler(model: Path, folder: Path, args: argparse.Namespace, ours: dict[str, Any], **options: Any) -> Any:
    """A sampler with one server to launch; `ours` are arguments of the server, `options` of the sampler. The log is
    `sglang/server-0.log` in `folder`."""
    config = RunConfig.model_validate(
        {
            "model": {"name": str(model)},
            "env": [{"id": "bench/None-v0"}],
            "algorithm": {"name": "grpo"},
            "train": {"steps": 1, "groups_per_step": 1, "group_size": 2},
        }
    )
    context = RunContext(config=config, run_dir=folder, model_path=model, tokenizer=load_tokenizer(model))
    arguments, environment = server_setup(args, **ours)
    made = SGLangSamplerOptions(python=args.python, server_args=arguments, env=environment, **options)
    return SGLangSampler(context, made)


def machine(args: argparse.Namespace, server_args: dict[str, Any]) -> dict[str, object]:
    """The head of a result file: what `describe` says, the servers' versions and arguments."""
    code = "import importlib.metadata as m; print(m.version('sglang'), m.version('torch'))"
    told = subprocess.run([args.python, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    return {**describe(), "servers": {"sglang": told[0], "torch": told[1], "arguments": server_args}}


def finish(result: dict[str, Any], name: str, args: argparse.Namespace) -> None:
    """Write where the arguments say."""
    text = json.dumps(result, indent=2) + "\n"
    targets = [*([RESULTS / f"{name}_{'gpu' if GPU else 'cpu'}.json"] if args.write else []), *filter(None, [args.out])]
    for target in targets:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")


def child_environment(python: str, environment: dict[str, str]) -> dict[str, str]:
    """That of a process of `python`, without the paths of this interpreter if it is another."""
    ours = () if python == sys.executable else ("PYTHONPATH", "VIRTUAL_ENV")
    return {**{name: value for name, value in os.environ.items() if name not in ours}, **environment}
