"""Weights reach servers byte for byte by files, of which none is left."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from sglang_weights_kit import awkward, described, servers, states
from torch import Tensor

from relax_gym_plugins.samplers.sglang.weights.disk import DiskSender

pytest_plugins = ["sglang_weights_fixtures"]


def model_folder(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json"):
        (model / name).write_text("{}")
    return model


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_disk_brings_every_byte(ports: list[int], tmp_path: Path, dtype: torch.dtype | None) -> None:
    found = servers(ports, 2)
    sender = DiskSender(tmp_path / "run" / "weights", model_folder(tmp_path), dtype=dtype, shard_bytes=200)
    weights = awkward()
    assert asyncio.run(sender.send(found, iter(weights.items()), 7)) == {}
    assert [state["weights"] for state in states(found)] == [described(weights, dtype)] * 2
    assert [state["version"] for state in states(found)] == ["7", "7"]
    folder = tmp_path / "run" / "weights" / "7"
    shards = list(folder.glob("*.safetensors"))
    assert len(shards) > 2
    assert (folder / "tokenizer.json").resolve() == tmp_path / "model" / "tokenizer.json"


def test_disk_keeps_the_newest_version_and_removes_all_at_the_end(ports: list[int], tmp_path: Path) -> None:
    (server,) = servers(ports, 1)
    sender = DiskSender(tmp_path / "weights", model_folder(tmp_path))
    for version in (1, 2, 2):
        assert asyncio.run(sender.send([server], [("a", torch.full((4,), float(version)))], version)) == {}
        assert [path.name for path in (tmp_path / "weights").iterdir()] == [str(version)]
    asyncio.run(sender.close())
    asyncio.run(sender.close())
    assert not (tmp_path / "weights").exists()


def test_disk_leaves_nothing_of_weights_that_could_not_be_written(ports: list[int], tmp_path: Path) -> None:
    (server,) = servers(ports, 1)

    def broken() -> Iterator[tuple[str, Tensor]]:
        yield "a", torch.zeros(4)
        raise RuntimeError("the learner is gone")

    sender = DiskSender(tmp_path / "weights", model_folder(tmp_path))
    with pytest.raises(RuntimeError, match="the learner is gone"):
        asyncio.run(sender.send([server], broken(), 1))
    assert not list((tmp_path / "weights").iterdir())
    assert states([server])[0]["calls"] == []


def test_k107_disk_names_the_server_that_fails(ports: list[int], tmp_path: Path) -> None:
    path = "/update_weights_from_disk"
    found = servers(ports, 3, s0={path: ["error"]}, s2={path: ["hang"]})
    sender = DiskSender(tmp_path / "weights", model_folder(tmp_path), timeout=3)
    failed = asyncio.run(sender.send(found, [("a", torch.zeros(4))], 1))
    assert set(failed) == {found[0], found[2]}
    assert [state["version"] for state in states(found)] == ["default", "1", "default"]
