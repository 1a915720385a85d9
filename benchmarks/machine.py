"""What a result was measured with and on."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("relax-gym", "torch", "transformers", "sglang")


def describe() -> dict[str, object]:
    """The running command, CPU, cores, GPUs if there are any, and versions: the head of every result file."""
    import torch

    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {
        "command": shlex.join(["python", *sys.argv]),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **({"gpus": gpus} if gpus else {}),
        **{package: found for package in PACKAGES if (found := installed(package))},
    }


def installed(package: str) -> str | None:
    """Its version, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cpu_name() -> str:
    """The processor's name and the matrix extensions that decide how fast bfloat16 is."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    facts = dict(line.split(":", 1) for line in info.read_text(encoding="utf-8").splitlines() if ":" in line)
    facts = {key.strip(): value.strip() for key, value in facts.items()}
    extensions = [flag for flag in ("avx512_bf16", "amx_bf16") if flag in facts.get("flags", "").split()]
    return f"{facts.get('model name', platform.processor())} ({', '.join(extensions) or 'no bfloat16 in hardware'})"
