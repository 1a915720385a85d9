"""Samplers and arguments that the SGLang benchmarks share."""

from __future__ import annotations

import argparse
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from machine import describe
from safetensors.torch import load_file
from shapes import DEVICE, GPU

from relax_gym.config import RunConfig
from relax_gym.context import RunContext
from relax_gym.models import load_tokenizer
from relax_gym_plugins.samplers.sglang.options import SGLangSamplerOptions
from relax_gym_plugins.samplers.sglang.sampler import SGLangSampler

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


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
