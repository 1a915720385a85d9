"""Fixtures of tests marked `sglang`; a file has them by `pytest_plugins = ["sglang_fixtures"]`, which shares them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from sglang_kit import cpu_server

from relax_gym.tiny_models import TinyOptions, build_tiny_qwen3
from relax_gym_plugins.samplers.sglang.process import ServerProcess


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `tiny-qwen3` that any test may serve."""
    folder = tmp_path_factory.mktemp("tiny-qwen3")
    build_tiny_qwen3(TinyOptions(), folder)
    return folder


@pytest.fixture(scope="session")
def sglang_server(tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One real server of `tiny_qwen3` for all tests of a session. They leave it idle and with the weights it had."""
    server = cpu_server(tiny_qwen3, tmp_path_factory.mktemp("sglang") / "server.log")
    asyncio.run(server.start())
    yield server
    asyncio.run(server.stop())
    assert server.log.read_text().endswith("launcher: SGLang ended with status 0\n"), "it did not stop in good order"
