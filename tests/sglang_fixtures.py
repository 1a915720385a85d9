"""Fixtures of tests marked `sglang`; a file has them by `pytest_plugins = ["sglang_fixtures"]`, which shares them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sglang_kit import changed, cpu_server
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from relax_gym.tiny_models import TinyOptions, build_tiny_qwen3
from relax_gym_plugins.samplers.sglang.engine import Engine
from relax_gym_plugins.samplers.sglang.process import ServerProcess
from relax_gym_plugins.samplers.sglang.weights.ipc import IpcSender


@contextmanager
def serving(server: ServerProcess) -> Iterator[ServerProcess]:
    """Start it; afterwards it must end in good order."""
    asyncio.run(server.start())
    yield server
    asyncio.run(server.stop())
    assert server.log.read_text().endswith("launcher: SGLang ended with status 0\n"), "it did not stop in good order"


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `tiny-qwen3` that any test may serve."""
    folder = tmp_path_factory.mktemp("tiny-qwen3")
    build_tiny_qwen3(TinyOptions(), folder)
    return folder


@pytest.fixture(scope="session")
def sglang_server(tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One real server of `tiny_qwen3` for all tests of a session. They leave it idle and with the weights it had."""
    with serving(cpu_server(tiny_qwen3, tmp_path_factory.mktemp("sglang") / "server.log")) as server:
        yield server


@pytest.fixture
def lent_server(sglang_server: ServerProcess, tiny_qwen3: Path) -> Iterator[ServerProcess]:
    """The same server for a test that changes its weights: it gets its own back."""
    yield sglang_server

    async def restore() -> None:
        engine = Engine(sglang_server.url, headers=sglang_server.headers)
        await engine.connect()
        assert await IpcSender().send([engine], changed(tiny_qwen3, 0).named_parameters(), 0) == {}
        await engine.aclose()

    asyncio.run(restore())


@pytest.fixture(scope="session")
def tiny_moe(tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of 4 experts, 2 for each token, in each of 2 layers."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_qwen3)
    shape = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "head_dim": 16}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4}
    config = Qwen3MoeConfig(
        **shape, **layers, num_experts_per_tok=2, vocab_size=len(tokenizer), norm_topk_prob=True, initializer_range=0.2
    )
    folder = tmp_path_factory.mktemp("tiny-moe")
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def moe_server(tiny_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A real server of `tiny_moe` that says which experts it chose. Tests send it the weights they want first."""
    log = tmp_path_factory.mktemp("sglang") / "moe.log"
    with serving(cpu_server(tiny_moe, log, {"enable_return_routed_experts": True})) as server:
        yield server
