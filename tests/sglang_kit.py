"""Real SGLang servers on a CPU, for tests marked `sglang`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from relax_gym.config import RunConfig
from relax_gym.context import RunContext
from relax_gym.models import load_language_model, load_tokenizer
from relax_gym_plugins.samplers.sglang.options import SGLangSamplerOptions
from relax_gym_plugins.samplers.sglang.process import ServerProcess
from relax_gym_plugins.samplers.sglang.sampler import SGLangSampler

VARIABLE = "RELAX_GYM_SGLANG_PYTHON"
KEY = "RELAX_GYM_TEST_KEY"
SHIM = Path(__file__).parent / "sglang_cpu/shim"
CPU_ARGUMENTS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "dtype": "float32",
    "mem_fraction_static": 0.3,
    "max_total_tokens": 8192,
    "sleep_on_idle": True,  # an idle server would poll, most of a core
    "grammar_backend": "none",
}
CPU_ENVIRONMENT = {
    "PYTHONPATH": str(SHIM),
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_CPU_OMP_THREADS_BIND": "0|1",  # only read with tensor or data parallelism
    "OMP_NUM_THREADS": "1",  # two threads that share cores with others are 18 times slower
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",
}

GPU_ARGUMENTS: dict[str, Any] = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "dtype": "bfloat16",  # its kernels know no float32
    "mem_fraction_static": 0.3,
    "cuda_graph_backend_prefill": "disabled",
}
ARGUMENTS = GPU_ARGUMENTS if torch.cuda.is_available() else CPU_ARGUMENTS
TOLERANCE = 0.05 if torch.cuda.is_available() else 1e-4
"""Of log-probs: in bfloat16 on GPUs, float32 on CPUs."""


def sglang_python() -> str:
    """The interpreter that has SGLang; the test fails when nobody says which."""
    if not (python := os.environ.get(VARIABLE)):
        pytest.fail(
            f"{VARIABLE} is not set; run tests/sglang_cpu/install.sh VENV and set it to VENV/bin/python", pytrace=False
        )
    return python


def cpu_server(
    model: Path, log: Path, arguments: Mapping[str, Any] | None = None, *, timeout: float = 300.0
) -> ServerProcess:
    """A server on a CPU, not started yet. `arguments` go over CPU_ARGUMENTS."""
    return ServerProcess(
        sglang_python(),
        model,
        {**CPU_ARGUMENTS, **(arguments or {})},
        log=log,
        env=CPU_ENVIRONMENT,
        timeout=timeout,
    )


def changed(model: Path, seed: int) -> PreTrainedModel:
    """The model with other weights, its own for seed 0."""
    loaded = load_language_model(model, dtype=torch.float32)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter += bool(seed) * 0.05 * torch.randn_like(parameter)
    return loaded


def context_of(model: Path, folder: Path) -> RunContext:
    """A run of a model, in a folder."""
    config = RunConfig.model_validate(
        {
            "model": {"name": str(model)},
            "env": [{"id": "test/None-v0"}],
            "algorithm": {"name": "grpo"},
            "train": {"steps": 1, "groups_per_step": 1, "group_size": 2},
        }
    )
    return RunContext(config=config, run_dir=folder, model_path=model, tokenizer=load_tokenizer(model))


def attached(server: ServerProcess, model: Path, folder: Path, **options: Any) -> SGLangSampler:
    """A sampler, not started yet, of a server that serves the model."""
    os.environ[KEY] = server.headers["Authorization"].removeprefix("Bearer ")
    given = SGLangSamplerOptions(urls=(server.url,), api_key_env=KEY, **options)
    return SGLangSampler(context_of(model, folder), given)


def processes(url: str) -> dict[int, str]:
    """pid → name of all processes of the launched server at a URL."""
    groups: dict[int, dict[int, str]] = {}
    launched = None
    for path in Path("/proc").glob("[0-9]*"):
        try:
            left, _, right = (path / "stat").read_text().rpartition(") ")
            command = (path / "cmdline").read_text(errors="replace").split("\0")
        except OSError:  # it ended meanwhile
            continue
        pid, name = left.split(" (", 1)
        group = int(right.split()[2])
        groups.setdefault(group, {})[int(pid)] = name
        if any("launcher.py" in word for word in command) and url.rpartition(":")[2] in command:
            launched = group
    assert launched is not None, f"nothing launched serves {url}"
    return groups[launched]
