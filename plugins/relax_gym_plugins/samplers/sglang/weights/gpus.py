"""GPUs as CUDA_VISIBLE_DEVICES names them."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch


def visible() -> list[str]:
    """The names of the GPUs that this process sees."""
    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    if told is None:
        return [str(number) for number in range(torch.cuda.device_count())]
    return [name.strip() for name in told.split(",") if name.strip()]


def ordinal(name: str) -> int | None:
    """The number that a GPU has in this process, None where it does not see it."""
    names = visible()
    return names.index(name) if name in names else None


def of_ranks(names: Sequence[str], *, ranks: int, first: int = 0, step: int = 1) -> tuple[str, ...]:
    """The GPUs that a server's ranks take of those that it sees."""
    return tuple(names[first::step][:ranks])
