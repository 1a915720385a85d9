"""Weights reach servers byte for byte in a group, which goes on without who fails."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from sglang_weights_kit import Server, awkward, described, on_gpu, servers, states
from torch import Tensor
from train_cases import OneOrTwo

from relax_gym.config import Options, parse_config
from relax_gym.errors import SamplerError, TrainingError
from relax_gym.plugins import plugins
from relax_gym.registry import Component
from relax_gym.train import train
from relax_gym_plugins.samplers.sglang.weights.broadcast import BroadcastSender
from relax_gym_plugins.samplers.sglang.weights.group import own_address

pytest_plugins = ["sglang_weights_fixtures"]

assert OneOrTwo  # registers test/OneOrTwo-v0

BROADCAST, JOIN = "/update_weights_from_distributed", "/init_weights_update_group"


async def broadcast(
    found: Sequence[Server], weights: Mapping[str, Tensor], *versions: int, **options: Any
) -> list[Mapping[Any, Exception]]:
    sender = BroadcastSender("gloo", **{"timeout": 15, **options})
    try:
        return [await sender.send(found, iter(weights.items()), version) for version in versions]
    finally:
        await sender.close()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_k108_broadcast_brings_every_byte(ports: list[int], dtype: torch.dtype | None) -> None:
    found = servers(ports, 2, tp_size=1)
    weights = awkward()
    assert asyncio.run(broadcast(found, weights, 7, 8, dtype=dtype, bucket_bytes=200)) == [{}, {}]
    for state in states(found):
        assert state["weights"] == described(weights, dtype)
        assert (state["version"], state["in_session"], state["groups"]) == ("8", False, [])
        joins = [call for call in state["calls"] if call["path"] == JOIN]
        assert len(joins) == 1
        sent = [(c["flush_cache"], c.get("weight_version")) for c in state["calls"] if c["path"] == BROADCAST]
        assert sent[-1] == (True, "8")
        assert {call for call in sent if call[1] is None} == {(False, None)}


def test_k94_the_group_meets_at_a_port_that_was_bound_not_guessed(ports: list[int]) -> None:
    found = servers(ports, 2, tp_size=1)
    asyncio.run(broadcast(found, awkward(), 1))
    asyncio.run(broadcast(found, awkward(), 2))
    joins = [[call for call in state["calls"] if call["path"] == JOIN] for state in states(found)]
    assert [[call["rank_offset"] for call in of] for of in joins] == [[1, 1], [2, 2]]
    assert {call["world_size"] for of in joins for call in of} == {3}
    assert joins[0][0]["master_port"] == joins[1][0]["master_port"] != 0
    assert joins[0][0]["group_name"] != joins[0][1]["group_name"]


@pytest.mark.parametrize(
    "faults",
    [
        {BROADCAST: ["ok", "error"]},
        {BROADCAST: ["ok", "late"]},
        pytest.param({JOIN: ["error"]}, marks=pytest.mark.slow),
        pytest.param({BROADCAST: ["ok", "hang"]}, marks=pytest.mark.slow),
        pytest.param({JOIN: ["hang"]}, marks=pytest.mark.slow),
        {"/begin_weight_update": ["error"]},
    ],
)
def test_k107_a_group_goes_on_without_the_server_that_fails(ports: list[int], faults: dict[str, list[str]]) -> None:
    found = servers(ports, 3, tp_size=1, s1=faults)
    weights = awkward()
    (failed,) = asyncio.run(broadcast(found, weights, 5, bucket_bytes=200, timeout=2))
    assert list(failed) == [found[1]]
    after = states(found)
    assert [state["version"] for state in after] == ["5", "default", "5"]
    assert [state["weights"] == described(weights) for state in after] == [True, False, True]
    assert [state["in_session"] for state in after] == [False, False, False]


def test_k106_after_a_cancelled_broadcast_the_next_one_works(ports: list[int]) -> None:
    found = servers(ports, 2, tp_size=1, s1={BROADCAST: ["hang"]})

    async def cancel() -> None:
        sender = BroadcastSender("gloo", timeout=2)
        task = asyncio.create_task(sender.send(found, [("a", torch.zeros(4))], 3))
        while BROADCAST not in [call["path"] for call in (await found[1].state())["calls"]]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert [(await server.state())["in_session"] for server in found] == [False, False]
        assert await sender.send(found, [("a", torch.ones(4))], 4) == {}
        await sender.close()

    asyncio.run(cancel())
    assert [state["version"] for state in states(found)] == ["4", "4"]


def test_servers_come_and_go_between_updates(ports: list[int]) -> None:
    found = servers(ports, 3, tp_size=1)

    async def updates() -> None:
        sender = BroadcastSender("gloo", timeout=15)
        assert await sender.open(found[:2]) == {}
        assert await sender.send(found[:2], awkward().items(), 1) == {}
        assert await sender.send(found[1:], awkward().items(), 2) == {}
        await sender.close()
        await sender.close()

    asyncio.run(updates())
    assert [state["version"] for state in states(found)] == ["1", "2", "2"]
    assert [state["groups"] for state in states(found)] == [[], [], []]


def test_a_server_that_was_restarted_joins_again(ports: list[int]) -> None:
    (server,) = found = servers(ports, 1, tp_size=1)

    async def updates() -> None:
        sender = BroadcastSender("gloo", timeout=15)
        assert await sender.send(found, awkward().items(), 1) == {}
        (group,) = (await server.state())["groups"]
        await server.post("/destroy_weights_update_group", {"group_name": group})
        assert await sender.open(found) == {}
        assert await sender.send(found, awkward().items(), 2) == {}
        await sender.close()

    asyncio.run(updates())
    assert [state["version"] for state in states(found)] == ["2"]


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str | None]]:
    """What NCCL is told; nothing at first, and nothing of it is left afterwards."""
    names = ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE")
    for name in names:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return lambda: [os.environ.get(name) for name in names]


@pytest.mark.parametrize("variable", [("NCCL_CUMEM_ENABLE", "1"), ("WORLD_SIZE", "2")])
def test_nccl_is_refused_where_it_would_hang(
    monkeypatch: pytest.MonkeyPatch, nccl: Callable[[], list[str | None]], variable: tuple[str, str]
) -> None:
    monkeypatch.setenv(*variable)
    before = nccl()
    with pytest.raises(SamplerError, match="NCCL_CUMEM_ENABLE=0 NCCL_NVLS_ENABLE=0 in the environment of each of the"):
        BroadcastSender("nccl")
    assert nccl() == before


def test_nccl_is_set_up_as_servers_do_before_there_is_a_learner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nccl: Callable[[], list[str | None]]
) -> None:
    def learner(*given: object) -> None:
        raise TrainingError(f"NCCL starts with {nccl()}")

    plugins().tables["learner"].add("test_nccl", Component(factory=learner, options=Options), "test")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = {
        "run_dir": str(tmp_path / "run"),
        "model": {"name": "tiny-qwen3"},
        "env": [{"id": "test/OneOrTwo-v0"}],
        "sampler": {"name": "sglang", "sync": "broadcast", "urls": ["http://127.0.0.1:9"]},
        "learner": {"name": "test_nccl"},
        "train": {"steps": 1, "groups_per_step": 1, "group_size": 2},
        "trackers": [],
    }
    with pytest.raises(TrainingError, match=r"NCCL starts with \['0', '0'\]"):
        train(parse_config(config))


def test_launched_processes_may_have_nccl_set_up(
    monkeypatch: pytest.MonkeyPatch, nccl: Callable[[], list[str | None]]
) -> None:
    BroadcastSender("nccl")
    assert nccl() == ["0", "0"]
    monkeypatch.setenv("WORLD_SIZE", "2")
    BroadcastSender("nccl")


def test_servers_reach_the_learner_by_the_interface_that_leads_to_them() -> None:
    assert own_address(["http://127.0.0.1:3000"]) == "127.0.0.1"


@pytest.mark.gpu
def test_k108_nccl_brings_every_byte(ports: list[int]) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    (server,) = servers(ports, 1, tp_size=1)
    # NCCL reads its settings once in a process, in this one perhaps for another test already.
    mp.start_processes(_send_over_nccl, args=(server,), start_method="spawn")
    assert states([server])[0]["weights"] == described(awkward())


def _send_over_nccl(number: int, server: Server) -> None:
    async def run() -> None:
        sender = BroadcastSender("nccl", bucket_bytes=200, timeout=60)
        assert await sender.open([server]) == {}
        assert await sender.send([server], on_gpu().items(), 7) == {}
        await sender.close()

    asyncio.run(run())
