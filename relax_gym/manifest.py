"""`manifest.json` of a run folder: what a run was started with, and on."""

from __future__ import annotations

import platform
import sys
import uuid
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from relax_gym.config import RunConfig
from relax_gym.plugins import plugins
from relax_gym.redaction import mask_text

PACKAGES = (
    *("relax-gym", "torch", "transformers", "gymnasium", "numpy", "tokenizers", "safetensors", "pydantic", "triton"),
    *("peft", "megatron-core", "transformer-engine", "flash-attn", "ray", "sglang", "datasets", "math-verify", "av"),
)
"""Those whose versions are named where they are installed. SGLang may be in an environment of its own."""


def manifest(config: RunConfig) -> dict[str, Any]:
    """What manifest.json says of a new run."""
    return {
        "run_id": uuid.uuid4().hex,
        "seed": config.seed,
        "command": [mask_text(config, part) for part in (Path(sys.argv[0]).name, *sys.argv[1:])],
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: found for name in PACKAGES if (found := installed(name))},
        "plugins": {name: source for name, source in plugins().sources.items() if source != "relax-gym"},
        "environments": [{"id": env.id, "kwargs": env.kwargs, "weight": env.weight} for env in config.env],
    }


def installed(package: str) -> str | None:
    """Its version, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
