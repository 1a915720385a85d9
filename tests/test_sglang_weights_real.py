"""Weights reach a real SGLang server, by every way: it answers with the log-probs of the new ones."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from sglang_kit import changed
from transformers import PreTrainedModel

from relax_gym_plugins.samplers.sglang.engine import Engine
from relax_gym_plugins.samplers.sglang.process import ServerProcess
from relax_gym_plugins.samplers.sglang.weights.base import WeightSender
from relax_gym_plugins.samplers.sglang.weights.broadcast import BroadcastSender
from relax_gym_plugins.samplers.sglang.weights.checksums import Checked
from relax_gym_plugins.samplers.sglang.weights.disk import DiskSender
from relax_gym_plugins.samplers.sglang.weights.ipc import IpcSender
from relax_gym_plugins.samplers.sglang.weights.names import checkpoint_names

pytest_plugins = ["sglang_fixtures"]
pytestmark = pytest.mark.sglang

IDS = [5, 20, 33, 47, 8, 60, 21, 12]
WAYS = ["ipc", "disk", "broadcast"]


def build(way: str, model: Path, folder: Path) -> WeightSender:
    if way == "disk":
        return DiskSender(folder, model, shard_bytes=100_000)
    if way == "ipc":
        return IpcSender(bucket_bytes=100_000)
    return BroadcastSender("gloo", bucket_bytes=100_000, timeout=60)


def logprobs(model: PreTrainedModel) -> list[float]:
    with torch.no_grad():
        scores = model(torch.tensor([IDS])).logits[0].log_softmax(-1)
    return [float(scores[at, id]) for at, id in enumerate(IDS[1:])]


async def served(engine: Engine) -> tuple[list[float], str]:
    body = {
        "input_ids": IDS,
        "sampling_params": {"max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    meta = (await engine.generate(body, timeout=60))["meta_info"]
    return [entry[0] for entry in meta["input_token_logprobs"][1:]], meta["weight_version"]


@pytest.fixture
def engine(lent_server: ServerProcess) -> Engine:
    return Engine(lent_server.url, headers=lent_server.headers)


@pytest.mark.parametrize("way", WAYS)
def test_a_real_server_samples_from_what_was_sent(way: str, engine: Engine, tiny_qwen3: Path, tmp_path: Path) -> None:
    async def run() -> None:
        await engine.connect()
        sender = build(way, tiny_qwen3, tmp_path / "weights")
        assert await sender.open([engine]) == {}
        for version in (3, 4):
            model = changed(tiny_qwen3, 10 * WAYS.index(way) + version)
            weights = Checked(model.named_parameters())
            assert await sender.send([engine], weights, version) == {}
            got, stamped = await served(engine)
            assert stamped == str(version)
            torch.testing.assert_close(torch.tensor(got), torch.tensor(logprobs(model)), atol=2e-4, rtol=0)
            assert await weights.verify([engine]) == {}
        await sender.close()
        await engine.aclose()

    asyncio.run(run())


def test_k108_checksums_of_a_real_server_tell_tensors_apart(engine: Engine, tiny_qwen3: Path) -> None:
    """Every tensor of the model is compared; one that differs in one number is named."""

    async def run() -> None:
        await engine.connect()
        model = changed(tiny_qwen3, 1)
        assert await IpcSender().send([engine], model.named_parameters(), 1) == {}
        theirs = (await engine.post("/weights_checker", {"action": "checksum"}))["ranks"][0]["checksums"]
        for name in ("layers.1.self_attn.k_proj", "layers.0.mlp.up_proj", "embed_tokens", "layers.2.self_attn.o_proj"):
            other = {key: value.clone() for key, value in model.named_parameters()}
            other[f"model.{name}.weight"].data[-1, -1] += 1
            checked = Checked(other.items())
            assert len(list(checked)) == len(other)
            assert set(theirs) <= set(checked._sums)
            ((_, error),) = (await checked.verify([engine])).items()
            assert "1 tensors differ" in str(error)
        await engine.aclose()

    asyncio.run(run())


def test_a_real_server_takes_experts(moe_server: ServerProcess, tiny_moe: Path, tmp_path: Path) -> None:
    async def run() -> None:
        engine = Engine(moe_server.url, headers=moe_server.headers)
        await engine.connect()
        for number, way in enumerate(WAYS):
            model = changed(tiny_moe, 50 + number)
            assert "model.layers.1.mlp.experts.gate_up_proj" in dict(model.named_parameters())
            sender = build(way, tiny_moe, tmp_path / "weights")
            weights = checkpoint_names(model.named_parameters(), model.config.model_type)
            assert await sender.send([engine], weights, number) == {}
            got, _ = await served(engine)
            torch.testing.assert_close(torch.tensor(got), torch.tensor(logprobs(model)), atol=2e-4, rtol=0)
            await sender.close()
        await engine.aclose()

    asyncio.run(run())
