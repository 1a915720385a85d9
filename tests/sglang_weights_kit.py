"""Fake servers as senders of weights see them, weights that are awkward to send, and what servers must then hold."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fake_sglang_weights import describe
from torch import Tensor

from relax_gym_plugins.samplers.sglang.engine import Engine


@dataclass(frozen=True)
class Features:
    update_session: bool = True


class Server:
    """A fake server as a sender sees it."""

    def __init__(self, port: int, *, update_session: bool = True, tp_size: int = 2) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.features = Features(update_session)
        self.tp_size = tp_size
        self.devices: tuple[str, ...] = ()

    async def post(self, path: str, body: Mapping[str, Any], *, timeout: float = 60.0) -> Any:
        engine = Engine(self.url)  # of its own, as each test has a new event loop
        try:
            return await engine.post(path, body, timeout=timeout)
        finally:
            await engine.aclose()

    async def state(self) -> dict[str, Any]:
        state: dict[str, Any] = await self.post("/state", {})
        return state


def servers(ports: list[int], count: int, *, tp_size: int = 2, **faults: Mapping[str, list[str]]) -> list[Server]:
    """Servers that forgot what earlier tests did; `s0={path: [kind]}` are the faults of the first."""
    found = [Server(port, tp_size=tp_size) for port in ports[:count]]
    asyncio.run(reset(found, faults))
    return found


async def reset(found: Sequence[Server], faults: Mapping[str, Any]) -> None:
    for number, server in enumerate(found):
        await server.post("/reset", faults.get(f"s{number}", {}))


def states(found: Sequence[Server]) -> list[dict[str, Any]]:
    async def ask() -> list[dict[str, Any]]:
        return [await server.state() for server in found]

    return asyncio.run(ask())


def described(weights: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, list[Any]]:
    return {
        name: describe(tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor)
        for name, tensor in weights.items()
    }


def awkward() -> dict[str, Tensor]:
    """Not contiguous, views of one storage, empty, of several widths, larger than a small bucket, needing gradients."""
    torch.manual_seed(3)
    base = torch.randn(8, 6)
    return {
        "byte": torch.arange(3, dtype=torch.uint8),
        "transposed": torch.randn(5, 7).T,
        "upper": base[:4],
        "lower": base[4:],
        "column": base[:, 1],
        "empty": torch.zeros(0, 4),
        "half": torch.randn(3, 3).to(torch.bfloat16),
        "scalar": torch.tensor(2.5),
        "count": torch.arange(5),
        "large": torch.randn(40, 10),
        "learned": torch.nn.Parameter(torch.randn(2, 2)),
        "expanded": torch.randn(1, 3).expand(4, 3),
    }


def on_gpu() -> dict[str, Tensor]:
    return {name: tensor.detach().cuda() for name, tensor in awkward().items()}
