"""Weights reach servers byte for byte, by every way; what fails is named and stops nobody else."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_sglang_weights import describe
from torch import Tensor

from relax_gym.errors import SamplerError
from relax_gym_plugins.samplers.sglang.engine import Engine
from relax_gym_plugins.samplers.sglang.weights.broadcast import BroadcastSender
from relax_gym_plugins.samplers.sglang.weights.buckets import buckets
from relax_gym_plugins.samplers.sglang.weights.checksums import Checked, gpu_checksum
from relax_gym_plugins.samplers.sglang.weights.disk import DiskSender
from relax_gym_plugins.samplers.sglang.weights.group import check_nccl, own_address
from relax_gym_plugins.samplers.sglang.weights.ipc import IpcSender
from relax_gym_plugins.samplers.sglang.weights.names import checkpoint_names


@dataclass(frozen=True)
class Features:
    update_session: bool = True


class Server:
    """A fake server as a sender sees it."""

    def __init__(self, port: int, *, update_session: bool = True, tp_size: int = 2) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.features = Features(update_session)
        self.tp_size = tp_size

    async def post(self, path: str, body: Mapping[str, Any], *, timeout: float = 60.0) -> Any:
        engine = Engine(self.url)  # of its own, as each test has a new event loop
        try:
            return await engine.post(path, body, timeout=timeout)
        finally:
            await engine.aclose()

    async def state(self) -> dict[str, Any]:
        state: dict[str, Any] = await self.post("/state", {})
        return state


@pytest.fixture(scope="module")
def ports() -> Iterator[list[int]]:
    """Of three fake servers, and of one that is older."""
    script = Path(__file__).with_name("fake_sglang_weights.py")
    command = [sys.executable, str(script), "new", "new", "new", "old"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())
        os.killpg(process.pid, signal.SIGKILL)


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


# Buckets --------------------------------------------------------------------------------------------------------------


def sizes(weights: Sequence[tuple[str, Tensor]], limit: int, dtype: torch.dtype | None = None) -> list[Any]:
    return [([slot.name for slot in b.slots], b.nbytes, b.last) for b in buckets(weights, dtype, limit)]


def test_buckets_are_filled_to_the_byte() -> None:
    four = [(name, torch.zeros(2)) for name in "abcd"]
    assert sizes(four, 16) == [(["a", "b"], 16, False), (["c", "d"], 16, True)]
    assert sizes(four, 15) == [(["a"], 8, False), (["b"], 8, False), (["c"], 8, False), (["d"], 8, True)]
    assert sizes(four, 24) == [(["a", "b", "c"], 24, False), (["d"], 8, True)]
    assert sizes(four, 16, torch.bfloat16) == [(["a", "b", "c", "d"], 16, True)]


def test_a_tensor_larger_than_a_bucket_travels_alone() -> None:
    weights = [("a", torch.zeros(1)), ("big", torch.zeros(9)), ("b", torch.zeros(1))]
    assert sizes(weights, 8) == [(["a"], 4, False), (["big"], 36, False), (["b"], 4, True)]


def test_empty_tensors_never_make_a_bucket() -> None:
    none = torch.zeros(0, 3)
    weights = [("n1", none), ("a", torch.zeros(4)), ("n2", none), ("b", torch.zeros(4)), ("n3", none)]
    assert sizes(weights, 16) == [(["n1", "a", "n2"], 16, False), (["b", "n3"], 16, True)]
    with pytest.raises(ValueError, match="no weights to send"):
        list(buckets([("n", none)]))


def test_slots_are_aligned_without_gaps() -> None:
    (bucket,) = buckets(awkward().items())
    assert [slot.start % slot.dtype.itemsize for slot in bucket.slots] == [0] * len(bucket.slots)
    assert [slot.end for slot in bucket.slots][:-1] == [slot.start for slot in bucket.slots][1:]
    widths = [slot.dtype.itemsize for slot in bucket.slots]
    assert widths == sorted(widths, reverse=True)


def test_weights_are_looked_at_one_bucket_at_a_time() -> None:
    seen = []

    def produce() -> Iterator[tuple[str, Tensor]]:
        for name in "abcd":
            seen.append(name)
            yield name, torch.zeros(2)

    pending = buckets(produce(), None, 8)
    next(pending)
    assert seen == ["a", "b"]


# Names ----------------------------------------------------------------------------------------------------------------


def test_stacked_experts_get_the_names_of_checkpoints() -> None:
    gate_up, down = torch.arange(24.0).view(2, 4, 3), torch.arange(12.0).view(2, 3, 2)
    weights = {"l.mlp.gate.weight": down[0], "l.mlp.experts.gate_up_proj": gate_up, "l.mlp.experts.down_proj": down}
    named = dict(checkpoint_names(weights.items(), "qwen3_moe"))
    assert list(named) == [
        "l.mlp.gate.weight",
        *(f"l.mlp.experts.{number}.{part}.weight" for number in (0, 1) for part in ("gate_proj", "up_proj")),
        *(f"l.mlp.experts.{number}.down_proj.weight" for number in (0, 1)),
    ]
    assert named["l.mlp.experts.1.up_proj.weight"].tolist() == [[18, 19, 20], [21, 22, 23]]
    assert named["l.mlp.experts.1.down_proj.weight"].tolist() == [[6, 7], [8, 9], [10, 11]]


def test_experts_of_a_model_that_is_not_known_are_refused() -> None:
    with pytest.raises(SamplerError, match=r"how checkpoints of gpt_oss hold experts is not known"):
        list(checkpoint_names([("l.mlp.experts.down_proj", torch.zeros(2, 3, 2))], "gpt_oss"))


# IPC ------------------------------------------------------------------------------------------------------------------


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


# Disk -----------------------------------------------------------------------------------------------------------------


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


# Broadcast ------------------------------------------------------------------------------------------------------------

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


# Checksums ------------------------------------------------------------------------------------------------------------


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


# NCCL -----------------------------------------------------------------------------------------------------------------


def test_nccl_is_refused_where_it_would_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
    with pytest.raises(SamplerError, match=r"NCCL_CUMEM_ENABLE=0 NCCL_NVLS_ENABLE=0 in the learner's environment"):
        asyncio.run(BroadcastSender("nccl").open([]))


def test_nccl_is_set_up_as_servers_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    check_nccl()
    assert (os.environ["NCCL_CUMEM_ENABLE"], os.environ["NCCL_NVLS_ENABLE"]) == ("0", "0")
    check_nccl()


def test_servers_reach_the_learner_by_the_interface_that_leads_to_them() -> None:
    assert own_address(["http://127.0.0.1:3000"]) == "127.0.0.1"


# GPUs -----------------------------------------------------------------------------------------------------------------


def on_gpu() -> dict[str, Tensor]:
    return {name: tensor.detach().cuda() for name, tensor in awkward().items()}


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


@pytest.mark.gpu
def test_k108_nccl_brings_every_byte(ports: list[int]) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    (server,) = servers(ports, 1, tp_size=1)
    weights = on_gpu()

    async def run() -> None:
        sender = BroadcastSender("nccl", bucket_bytes=200, timeout=60)
        assert await sender.open([server]) == {}
        assert await sender.send([server], weights.items(), 7) == {}
        await sender.close()

    asyncio.run(run())
    assert states([server])[0]["weights"] == described(weights)


@pytest.mark.gpu
def test_checksums_are_the_same_on_every_device() -> None:
    numbers = torch.arange(1_500_000).bfloat16()
    assert gpu_checksum(numbers.cuda()) == gpu_checksum(numbers)
