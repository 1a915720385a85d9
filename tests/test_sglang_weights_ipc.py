"""Weights reach servers byte for byte through shared memory; what fails is named and stops nobody else."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest
import torch
from sglang_weights_kit import Server, awkward, described, on_gpu, servers, states

from relax_gym.errors import SamplerError
from relax_gym_plugins.samplers.sglang.weights.ipc import IpcSender, _places

pytest_plugins = ["sglang_weights_fixtures"]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bucket_bytes", [200, 1 << 20])
def test_k108_ipc_brings_every_byte(ports: list[int], dtype: torch.dtype | None, bucket_bytes: int) -> None:
    found = servers(ports, 2)
    weights = awkward()
    sender = IpcSender(dtype=dtype, bucket_bytes=bucket_bytes, timeout=30)
    assert asyncio.run(sender.send(found, iter(weights.items()), 7)) == {}
    for state in states(found):
        assert state["weights"] == described(weights, dtype)
        assert (state["version"], state["in_session"]) == ("7", False)


def test_only_the_last_bucket_flushes_and_carries_the_version(ports: list[int]) -> None:
    (server,) = servers(ports, 1)
    sender = IpcSender(bucket_bytes=16)
    weights = [(name, torch.zeros(4)) for name in "abc"]
    assert asyncio.run(sender.send([server], weights, 3)) == {}
    assert asyncio.run(sender.send([server], weights[:1], 4, flush=False)) == {}
    calls = states([server])[0]["calls"]
    assert [call["path"] for call in calls] == [
        "/begin_weight_update",
        *["/update_weights_from_tensor"] * 3,
        "/end_weight_update",
        "/begin_weight_update",
        "/update_weights_from_tensor",
        "/end_weight_update",
    ]
    sent = [(c.get("flush_cache"), c.get("weight_version"), c["nbytes"]) for c in calls if "nbytes" in c]
    assert sent == [(False, None, 16), (False, None, 16), (True, "3", 16), (False, "4", 16)]


def test_servers_without_update_sessions_are_asked_for_none(ports: list[int]) -> None:
    old = Server(ports[3], update_session=False)
    assert asyncio.run(IpcSender().send([old], [("a", torch.zeros(4))], 3)) == {}
    (state,) = states([old])
    assert [call["path"] for call in state["calls"]] == ["/update_weights_from_tensor"]
    assert state["version"] == "3"


def test_a_session_that_another_run_left_open_is_ended(ports: list[int]) -> None:
    (server,) = servers(ports, 1)
    asyncio.run(server.post("/begin_weight_update", {}))
    assert asyncio.run(IpcSender().send([server], [("a", torch.zeros(4))], 3)) == {}
    assert states([server])[0]["version"] == "3"


UPDATE = "/update_weights_from_tensor"


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ({UPDATE: ["ok", "error"]}, "told to fail"),
        ({UPDATE: ["ok", "late"]}, "told to fail late"),
        ({UPDATE: ["ok", "hang"]}, "did not answer"),
        ({"/begin_weight_update": ["error"]}, "told to fail"),
    ],
)
def test_k107_a_server_that_fails_is_named_and_stops_no_other(
    ports: list[int], faults: dict[str, list[str]], message: str
) -> None:
    found = servers(ports, 3, s1=faults)
    weights = awkward()
    failed = asyncio.run(IpcSender(bucket_bytes=64, timeout=3).send(found, weights.items(), 5))
    assert list(failed) == [found[1]]
    assert isinstance(failed[found[1]], SamplerError)
    assert message in str(failed[found[1]])
    after = states(found)
    assert [state["version"] for state in after] == ["5", "default", "5"]
    assert [state["weights"] == described(weights) for state in after] == [True, False, True]
    assert [state["in_session"] for state in after] == [False, False, False]
    assert after[1]["calls"][-1]["path"] in ("/end_weight_update", "/begin_weight_update")


def test_sending_stops_when_no_server_is_left(ports: list[int]) -> None:
    (server,) = servers(ports, 1, s0={UPDATE: ["error"]})
    read = []
    weights = ((name, read.append(name) or torch.zeros(4)) for name in "abcdef")
    assert list(asyncio.run(IpcSender(bucket_bytes=16).send([server], weights, 3))) == [server]
    assert read == ["a", "b"]


def test_k106_a_cancelled_update_ends_its_session(ports: list[int]) -> None:
    (server,) = servers(ports, 1, s0={UPDATE: ["hang"]})

    async def cancel() -> None:
        task = asyncio.create_task(IpcSender().send([server], [("a", torch.zeros(4))], 3))
        while not (await server.state())["calls"][1:]:  # noqa: ASYNC110 - another process gets there
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(cancel())
    assert not states([server])[0]["in_session"]


@pytest.mark.parametrize("fault", ["ok", "error", "late", "hang"])
def test_k108_shared_memory_is_given_back(ports: list[int], fault: str) -> None:
    found = servers(ports, 2, s1={UPDATE: ["ok", fault]})
    files = set(Path("/dev/shm").glob(f"torch_{os.getpid()}_*"))
    asyncio.run(IpcSender(bucket_bytes=64, timeout=3).send(found, awkward().items(), 5))
    assert set(Path("/dev/shm").glob(f"torch_{os.getpid()}_*")) <= files


def test_sharing_strategy_and_modules_of_the_process_stay_as_they_are(ports: list[int]) -> None:
    (server,) = servers(ports, 1)
    strategy = torch.multiprocessing.get_sharing_strategy()
    assert asyncio.run(IpcSender().send([server], [("a", torch.zeros(4))], 3)) == {}
    assert torch.multiprocessing.get_sharing_strategy() == strategy == "file_descriptor"
    assert not [name for name in sys.modules if name == "sglang" or name.startswith("sglang.")]


@pytest.mark.parametrize(
    ("visible", "devices", "expected"),
    [
        (None, ("1", "0"), ["cuda:1", "cuda:0"]),
        ("4,5", ("5", "4"), ["cuda:1", "cuda:0"]),
        ("GPU-a, GPU-b", ("GPU-b",), ["cuda:1", "cuda:0"]),
        ("4,5", ("5", "6"), ["cuda:1", "cuda:0"]),
        (None, (), ["cuda:0", "cuda:0"]),
    ],
)
def test_each_rank_reads_on_its_own_gpu_where_the_learner_sees_it(
    visible: str | None, devices: tuple[str, ...], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise from the learner's, "cuda:0" here. A server dies of weights that come from another GPU than that of the
    memory it can free."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    server = Server(0)
    server.devices = devices
    assert [str(place) for place in _places(server, torch.device("cuda:0"))] == expected
    assert _places(server, torch.device("cpu")) == [torch.device("cpu")] * 2


@pytest.mark.gpu
def test_k108_ipc_brings_every_byte_to_another_gpu(ports: list[int]) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    found = servers(ports, 2)
    found[1].devices = ("1", "1")
    assert asyncio.run(IpcSender(bucket_bytes=200).send(found, on_gpu().items(), 7)) == {}
    for state in states(found):
        assert state["weights"] == described(on_gpu())


@pytest.mark.gpu
def test_k108_ipc_brings_every_byte_of_a_gpu_and_leaks_none(ports: list[int]) -> None:
    found = servers(ports, 3, s1={UPDATE: ["ok", "error"]})
    weights = on_gpu()
    before = torch.cuda.memory_allocated()
    sender = IpcSender(dtype=torch.bfloat16, bucket_bytes=200)
    assert list(asyncio.run(sender.send(found, weights.items(), 7))) == [found[1]]
    for at in (0, 2):
        assert states(found)[at]["weights"] == described(weights, torch.bfloat16)
    torch.cuda.ipc_collect()
    assert torch.cuda.memory_allocated() == before
