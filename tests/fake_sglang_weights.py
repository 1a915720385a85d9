"""Servers that really receive weights: `python fake_sglang_weights.py new new old` serves three and prints their ports;
an old one has no update sessions.

What they unpickle, join and answer follows SGLang 0.5.23's `SafeUnpickler`, `init_custom_process_group` and
`SchedulerWeightUpdaterManager`. Each is a process of its own: a group's name is taken once in each, and passing memory
within one would prove nothing.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import hashlib
import io
import json
import os
import pickle
import socket
import sys
import types
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from aiohttp import web
from safetensors import safe_open
from torch.distributed.distributed_c10d import Backend, _new_process_group_helper, _world, rendezvous
from torch.multiprocessing import reductions

TP = 2
ALLOWED = {
    ("torch", "Tensor"),
    ("torch", "Size"),
    ("torch", "bfloat16"),
    ("torch", "float32"),
    ("torch", "float16"),
    ("torch", "int64"),
    ("torch", "uint8"),
    ("torch.storage", "UntypedStorage"),
    ("torch.storage", "TypedStorage"),
    ("torch.multiprocessing.reductions", "rebuild_tensor"),
    ("torch.multiprocessing.reductions", "rebuild_storage_filename"),
    ("torch.multiprocessing.reductions", "rebuild_typed_storage"),
    ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata"),
    ("sglang.srt.utils.patch_torch", "_rebuild_cuda_tensor_modified"),
}


@dataclasses.dataclass
class FlattenedTensorMetadata:
    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


def _rebuild_cuda_tensor_modified(*args: Any) -> torch.Tensor:
    uuids = [str(torch.cuda.get_device_properties(at).uuid) for at in range(torch.cuda.device_count())]
    return reductions.rebuild_cuda_tensor(*args[:6], uuids.index(args[6]), *args[7:])


STUBS = {
    "sglang.srt.weight_sync.tensor_bucket": FlattenedTensorMetadata,
    "sglang.srt.utils.patch_torch": _rebuild_cuda_tensor_modified,
}


class SafeUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise RuntimeError(f"Blocked unsafe global ({module}.{name}) during pickle deserialization")
        return STUBS.get(module) or super().find_class(module, name)


class Refused(Exception):
    pass


class FakeServer:
    """Faults: {path: [kind, kind, …]}, one for each call of that path: "ok", "error" (400 before it does anything),
    "late" (400 after it did), "hang"."""

    def __init__(self, update_session: bool) -> None:
        self.update_session = update_session
        self.weights: dict[str, torch.Tensor] = {}
        self.version = "default"
        self.in_session = False
        self.faults: dict[str, list[str]] = {}
        self.calls: list[dict[str, Any]] = []
        self.groups: dict[str, Any] = {}
        self.devices: dict[str, str] = {}

    async def handle(self, request: web.Request) -> web.Response:
        path = request.path
        body = json.loads(await request.read() or b"{}")
        if path == "/state":
            return web.json_response(self.state())
        if path == "/reset":
            self.weights, self.calls, self.version = {}, [], "default"
            self.faults, self.in_session = body, False
            return web.json_response({})
        kept = {key: value for key, value in body.items() if key not in ("serialized_named_tensors", "names")}
        self.calls.append({"path": path, **kept})
        kinds = self.faults.get(path)
        fault = kinds.pop(0) if kinds else "ok"
        if fault == "hang":
            await asyncio.sleep(3600)
        try:
            if fault == "error":
                raise Refused("told to fail")
            reply = await asyncio.to_thread(getattr(self, path[1:]), body)
            if fault == "late":
                raise Refused("told to fail late")
        except Exception as error:
            return web.json_response({"success": False, "message": str(error)}, status=400)
        return web.json_response({"success": True, "message": "Success", **(reply or {})})

    def state(self) -> dict[str, Any]:
        return {
            "weights": {name: describe(tensor) for name, tensor in self.weights.items()},
            "version": self.version,
            "in_session": self.in_session,
            "calls": self.calls,
            "groups": list(self.groups),
        }

    def begin_weight_update(self, body: dict[str, Any]) -> None:
        if self.in_session:
            raise Refused("a weight-update session is already open; call end_weight_update() first")
        self.in_session = True

    def end_weight_update(self, body: dict[str, Any]) -> None:
        if not self.in_session:
            raise Refused("no weight-update session is open; call begin_weight_update() first")
        self.in_session = False

    def update_weights_from_tensor(self, body: dict[str, Any]) -> None:
        self.check_session("update_weights_from_tensor")
        assert body["load_format"] == "flattened_bucket"
        assert len(body["serialized_named_tensors"]) == TP
        shards = [unpack(base64.b64decode(text, validate=True)) for text in body["serialized_named_tensors"]]
        for name, tensor in shards[0].items():
            assert torch.equal(tensor, shards[1][name])
        self.calls[-1]["nbytes"] = sum(tensor.nbytes for tensor in shards[0].values())
        self.load(shards[0], body)

    def init_weights_update_group(self, body: dict[str, Any]) -> None:
        """As `init_custom_process_group`. One process stands for all ranks, so the group takes servers of one rank."""
        world, rank, name = body["world_size"], body["rank_offset"], body["group_name"]
        limit = timedelta(seconds=20)
        url = f"tcp://{body['master_address']}:{body['master_port']}"
        store, rank, world = next(rendezvous(url, rank, world, timeout=limit))
        store.set_timeout(limit)
        group, _ = _new_process_group_helper(
            world,
            rank,
            [],
            Backend(body["backend"]),
            dist.PrefixStore(name, store),
            group_name=f"{name}",
            timeout=limit,
        )
        _world.pg_group_ranks[group] = {at: at for at in range(world)}
        self.groups[name] = group
        # The learner has the first GPU.
        self.devices[name] = f"cuda:{torch.cuda.device_count() - 1}" if body["backend"] == "nccl" else "cpu"

    def destroy_weights_update_group(self, body: dict[str, Any]) -> None:
        if body["group_name"] not in self.groups:
            raise Refused("The group to be destroyed does not exist.")
        dist.destroy_process_group(self.groups.pop(body["group_name"]))

    def update_weights_from_distributed(self, body: dict[str, Any]) -> None:
        self.check_session("update_weights_from_distributed")
        assert body["load_format"] == "flattened_bucket"
        group, places, end = self.groups[body["group_name"]], [], 0
        for name, kind, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
            dtype = getattr(torch, kind)
            assert end % dtype.itemsize == 0
            start, end = end, end + torch.Size(shape).numel() * dtype.itemsize
            places.append((name, dtype, shape, start, end))
        flat = torch.empty(end, dtype=torch.uint8, device=self.devices[body["group_name"]])
        dist.broadcast(flat, src=0, group=group)
        self.calls[-1]["nbytes"] = end
        self.load({name: flat[a:b].view(dtype).reshape(shape) for name, dtype, shape, a, b in places}, body)

    def update_weights_from_disk(self, body: dict[str, Any]) -> None:
        folder = Path(body["model_path"])
        assert (folder / "config.json").is_file()
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        weights = {}
        for shard in sorted(set(index["weight_map"].values())):
            with safe_open(folder / shard, "pt") as reader:  # type: ignore[no-untyped-call]
                weights.update({name: reader.get_tensor(name) for name in reader.keys()})  # noqa: SIM118
        assert set(weights) == set(index["weight_map"])
        self.load(weights, body)

    def weights_checker(self, body: dict[str, Any]) -> dict[str, Any]:
        sums = {name: digest(tensor)[:16] for name, tensor in fused(self.weights).items()}
        whole = hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()
        rank = {"checksums": sums, "per_gpu_checksum": whole, "parallelism_info": []}
        return {"ranks": [rank], "per_engine_checksum": whole}

    def corrupt(self, body: dict[str, Any]) -> None:
        self.weights[body["name"]].flatten()[0] += 1

    def check_session(self, path: str) -> None:
        if self.update_session and not self.in_session:
            raise Refused(f"{path} must run between begin_weight_update() and end_weight_update()")

    def load(self, weights: dict[str, torch.Tensor], body: dict[str, Any]) -> None:
        self.weights.update({name: tensor.cpu().clone() for name, tensor in weights.items()})
        if body.get("weight_version") is not None:
            self.version = body["weight_version"]


def unpack(data: bytes) -> dict[str, torch.Tensor]:
    parts = SafeUnpickler(io.BytesIO(data)).load()
    flat = parts["flattened_tensor"]
    assert flat.dtype is torch.uint8
    assert flat.numel() == max(meta.end_idx for meta in parts["metadata"])
    return {
        meta.name: flat[meta.start_idx : meta.end_idx].view(meta.dtype).reshape(meta.shape)
        for meta in parts["metadata"]
    }


def fused(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Under SGLang's names: q, k, v and gate, up are one each, rows of the vocabulary a multiple of 64."""
    out: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in weights.items():
        at = 0
        for whole, parts in {
            "qkv_proj": ("q_proj", "k_proj", "v_proj"),
            "gate_up_proj": ("gate_proj", "up_proj"),
        }.items():
            for number, part in enumerate(parts):
                if f".{part}." in name:
                    name, at = name.replace(part, whole), number
        if "embed_tokens" in name:
            tensor = torch.cat([tensor, tensor.new_zeros(-len(tensor) % 64, tensor.shape[1])])
        out.setdefault(name, {})[at] = tensor
    return {name: torch.cat([parts[at] for at in sorted(parts)]) for name, parts in out.items()}


def digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()


def describe(tensor: torch.Tensor) -> list[Any]:
    return [str(tensor.dtype)[6:], list(tensor.shape), digest(tensor)]


async def serve(listener: socket.socket, update_session: bool) -> None:
    for module, found in STUBS.items():
        stub = types.ModuleType(module)
        setattr(stub, found.__name__, found)
        sys.modules[module] = stub
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", FakeServer(update_session).handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.SockSite(runner, listener).start()
    await asyncio.Event().wait()


def main(kinds: list[str]) -> None:
    os.environ.update(NCCL_CUMEM_ENABLE="0", NCCL_NVLS_ENABLE="0")  # as SGLang does
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in kinds]
    print(json.dumps([listener.getsockname()[1] for listener in listeners]), flush=True)
    for listener, kind in zip(listeners, kinds, strict=True):
        if not os.fork():  # torch is imported once for all
            asyncio.run(serve(listener, kind == "new"))
    os.wait()


if __name__ == "__main__":
    main(sys.argv[1:])
