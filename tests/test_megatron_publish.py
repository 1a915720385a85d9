"""Weights of the Megatron learner reach samplers, by every way, byte for byte; who leaves midway blocks nobody."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_sglang_weights import describe
from learner_cases import context, qwen3, random_batch, save_model
from local_sampler_kit import serving
from megatron_models import CONFIGS
from safetensors.torch import load_file
from sglang_kit import cpu_server
from sglang_weights_kit import servers, states
from torch import Tensor
from transformers import AutoModelForCausalLM

from relax_gym.errors import SamplerError
from relax_gym.models import load_tokenizer
from relax_gym.tiny_models import TinyOptions, build_tiny_qwen3
from relax_gym_plugins.samplers.sglang.engine import Engine
from relax_gym_plugins.samplers.sglang.weights.base import WeightSender
from relax_gym_plugins.samplers.sglang.weights.broadcast import BroadcastSender
from relax_gym_plugins.samplers.sglang.weights.disk import DiskSender
from relax_gym_plugins.samplers.sglang.weights.ipc import IpcSender
from relax_gym_trainers.megatron_learner import learner as front
from relax_gym_trainers.megatron_learner.learner import MegatronLearner
from relax_gym_trainers.megatron_learner.options import MegatronLearnerOptions

pytest_plugins = ["sglang_weights_fixtures"]
pytestmark = [  # Megatron's
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def learner(folder: Path, **options: Any) -> MegatronLearner:
    return MegatronLearner(context(folder), MegatronLearnerOptions(**{"dtype": "float32", "timeout": 100.0, **options}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts: its checkpoint has most names."""
    return save_model(tmp_path_factory.mktemp("model"), CONFIGS["qwen3_moe"]())


@pytest.fixture(scope="module")
def trained(folder: Path) -> Iterator[MegatronLearner]:
    """Two ranks that share matrices and experts, after a step."""
    found = learner(folder, tp=2, ep=2, etp=1)
    found.step(random_batch())
    yield found
    found.close()


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "BUCKET_BYTES", 5_000)


def saved(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def exported(trained: MegatronLearner, folder: Path) -> dict[str, Tensor]:
    trained.export(folder)
    return saved(folder)


# First those with a learner of their own: a process is a rank of one at a time.


@pytest.mark.slow
def test_tied_embeddings_are_published_once_in_the_dtype_that_is_trained_in(tmp_path: Path) -> None:
    folder = save_model(tmp_path, qwen3())
    found = learner(folder, pp=2, dtype="bfloat16")
    got = dict(found.weights())
    found.close()
    want = saved(folder)
    assert sorted(got) == sorted(want) and "lm_head.weight" not in got
    assert all(
        tensor.dtype is torch.bfloat16 and torch.equal(tensor, want[name].bfloat16()) for name, tensor in got.items()
    )


IDS = [5, 20, 33, 47, 8, 60, 21, 12]


def plain_logprobs(folder: Path) -> list[float]:
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        scores = model(torch.tensor([IDS])).logits[0].log_softmax(-1)
    return [float(scores[at, id]) for at, id in enumerate(IDS[1:])]


@pytest.mark.sglang
def test_a_real_server_samples_from_what_two_ranks_have_trained(tmp_path: Path) -> None:
    """By every way, after a step each; its log-probs are those of the exported model."""
    model = tmp_path / "model"
    build_tiny_qwen3(TinyOptions(), model)
    tokenizer = load_tokenizer(model)
    run = dataclasses.replace(context(model), tokenizer=tokenizer)
    trained = MegatronLearner(run, MegatronLearnerOptions.model_validate({"dtype": "float32", "tp": 2, "timeout": 200}))

    async def published(engine: Engine, way: str, version: int) -> list[float]:
        way_there = sender(way, model, tmp_path / "weights")
        assert await way_there.open([engine]) == {}
        assert await way_there.send([engine], trained.weights(), version) == {}
        body: dict[str, Any] = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 1}}
        meta = (await engine.generate({**body, "return_logprob": True, "logprob_start_len": 0}, timeout=60))[
            "meta_info"
        ]
        await way_there.close()
        assert meta["weight_version"] == str(version)
        return [entry[0] for entry in meta["input_token_logprobs"][1:]]

    async def use() -> None:
        server = cpu_server(model, tmp_path / "server.log")
        await server.start()
        engine = Engine(server.url, headers=server.headers)
        await engine.connect()
        for version, way in enumerate(("ipc", "disk", "broadcast"), start=1):
            trained.step(random_batch(version))
            got = await published(engine, way, version)
            trained.export(tmp_path / way)
            torch.testing.assert_close(
                torch.tensor(got), torch.tensor(plain_logprobs(tmp_path / way)), atol=2e-4, rtol=0
            )
        await engine.aclose()
        await server.stop()

    asyncio.run(use())
    trained.close()


@pytest.mark.slow
def test_what_is_published_is_what_is_exported(trained: MegatronLearner, folder: Path, tmp_path: Path) -> None:
    want, published = exported(trained, tmp_path), list(trained.weights())
    assert len({name for name, _ in published}) == len(published)
    assert sorted(name for name, _ in published) == sorted(want) == sorted(saved(folder))
    assert all(tensor.dtype is torch.float32 and torch.equal(tensor, want[name]) for name, tensor in published)


def sender(way: str, model: Path, folder: Path) -> WeightSender:
    if way == "disk":
        return DiskSender(folder, model, shard_bytes=20_000)
    if way == "ipc":
        return IpcSender(bucket_bytes=20_000)
    return BroadcastSender("gloo", bucket_bytes=20_000, timeout=30)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["disk", "ipc", "broadcast"])
def test_servers_get_every_byte(
    trained: MegatronLearner, ports: list[int], folder: Path, tmp_path: Path, way: str
) -> None:
    found = servers(ports, 2, tp_size=1 if way == "broadcast" else 2)

    async def send() -> None:
        way_there = sender(way, folder, tmp_path / "weights")
        assert await way_there.open(found) == {}
        assert await way_there.send(found, trained.weights(), 1) == {}
        await way_there.close()

    asyncio.run(send())
    want = {name: describe(tensor) for name, tensor in exported(trained, tmp_path / "want").items()}
    for state in states(found):
        assert (state["weights"], state["version"]) == (want, "1")


@pytest.mark.slow
def test_the_local_sampler_takes_experts_as_checkpoints_name_them(
    trained: MegatronLearner, folder: Path, tmp_path: Path
) -> None:
    trained.export(tmp_path)
    want = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()

    async def run() -> dict[str, Tensor]:
        async with serving(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)) as sampler:
            await sampler.update_weights(trained.weights(), 1)
            incomplete = [(name, tensor) for name, tensor in trained.weights() if "1.up_proj" not in name]
            with pytest.raises(SamplerError, match=r"missing model.layers.0.mlp.experts.gate_up_proj"):
                await sampler.update_weights(incomplete, 2)
            return dict(sampler.engine._runner.model.state_dict())

    got = asyncio.run(run())
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.slow
def test_k116_weights_that_nobody_takes_block_no_rank(trained: MegatronLearner, tmp_path: Path) -> None:
    """Left at the first, between two gathers, and never begun; closed or not."""
    left = [trained.weights() for _ in range(3)]
    next(left[0])
    for _ in range(20):
        next(left[1])
    left[1].close()
    want = exported(trained, tmp_path)
    assert {name: tensor.sum() for name, tensor in trained.weights()} == {n: t.sum() for n, t in want.items()}
    assert trained.step(random_batch(1))["updates"] == 1
    with pytest.raises(RuntimeError, match="lost to a later call"):
        list(left[0])
