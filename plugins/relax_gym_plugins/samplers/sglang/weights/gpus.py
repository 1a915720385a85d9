"""GPUs as CUDA_VISIBLE_DEVICES names them."""

from __future__ import annotations

import os

import torch


def visible() -> list[str]:
    """The names of the GPUs that this process sees."""
    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    if told is None:
        return [str(number) for number in range(torch.cuda.device_count())]
    return named(told)


def named(told: str) -> list[str]:
    """The GPUs in a value of CUDA_VISIBLE_DEVICES."""
    return [name.strip() for name in told.split(",") if name.strip()]


def ordinal(name: str) -> int | None:
    """The number that a GPU has in this process, None where it does not see it."""
    names = visible()
    return names.index(name) if name in names else None
