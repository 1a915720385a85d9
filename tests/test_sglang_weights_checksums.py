"""Checksums name the server whose weights differ."""

from __future__ import annotations

import asyncio

import pytest
import torch
from sglang_weights_kit import servers
from torch import Tensor

from relax_gym_plugins.samplers.sglang.weights.checksums import Checked, gpu_checksum
from relax_gym_plugins.samplers.sglang.weights.ipc import IpcSender

pytest_plugins = ["sglang_weights_fixtures"]


def qwen() -> dict[str, Tensor]:
    """Names as in a checkpoint; a vocabulary that servers pad."""
    torch.manual_seed(5)
    shapes = {"q_proj": (8, 4), "k_proj": (4, 4), "v_proj": (4, 4), "o_proj": (4, 8)}
    attention = {f"model.layers.0.self_attn.{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    mlp = {f"model.layers.0.mlp.{name}.weight": torch.randn(6, 4) for name in ("gate_proj", "up_proj")}
    return {"model.embed_tokens.weight": torch.randn(97, 4), **attention, **mlp, "model.norm.weight": torch.ones(4)}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_k108_checksums_name_the_server_whose_bytes_differ(ports: list[int], dtype: torch.dtype | None) -> None:
    found = servers(ports, 3, tp_size=2)
    weights = Checked(qwen().items(), dtype)
    assert asyncio.run(IpcSender(dtype=dtype, bucket_bytes=100).send(found, weights, 1)) == {}
    assert asyncio.run(weights.verify(found)) == {}
    for name in ("model.layers.0.self_attn.v_proj.weight", "model.embed_tokens.weight", "model.norm.weight"):
        asyncio.run(found[1].post("/corrupt", {"name": name}))
    split = asyncio.run(weights.verify(found))
    assert list(split) == [found[1]]
    assert "holds other weights than most servers" in str(split[found[1]])
    for server in found:
        server.tp_size = 1
    whole = asyncio.run(weights.verify(found))
    assert list(whole) == [found[1]]
    assert "3 tensors differ, " in str(whole[found[1]])
    assert "model.layers.0.self_attn.qkv_proj.weight" in str(whole[found[1]])


def test_a_server_that_cannot_tell_checksums_is_named(ports: list[int]) -> None:
    found = servers(ports, 2, s0={"/weights_checker": ["error"]})
    assert list(asyncio.run(Checked([]).verify(found))) == [found[0]]


@pytest.mark.parametrize(
    ("count", "dtype", "expected"),
    [
        (1, torch.uint8, "3d93a6540b54ef2a"),
        (5, torch.uint8, "5378e41554869438"),
        (7, torch.bfloat16, "6acd222320afb5c2"),
        (100, torch.float32, "0dbb443ec0651725"),
        (8192, torch.float32, "bd3bf69e6ae40122"),
        (20001, torch.bfloat16, "c61a761bf6de10bc"),
        (0, torch.float32, "0000000000000000"),
    ],
)
def test_checksums_of_gpus_are_sglangs(count: int, dtype: torch.dtype, expected: str) -> None:
    """Expected: SGLang 0.5.23's own kernel on the same numbers."""
    whole = torch.arange(count).to(dtype)
    assert gpu_checksum(whole) == gpu_checksum(whole[: count // 3], whole[count // 3 :]) == expected


@pytest.mark.gpu
def test_checksums_are_the_same_on_every_device() -> None:
    numbers = torch.arange(1_500_000).bfloat16()
    assert gpu_checksum(numbers.cuda()) == gpu_checksum(numbers)
