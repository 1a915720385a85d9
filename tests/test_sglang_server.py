"""Launching real SGLang servers."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import aiohttp
import pytest
from sglang_kit import cpu_server, processes
from test_sglang_process import all_gone, in_loop

from relax_gym.errors import SamplerError
from relax_gym_plugins.samplers.sglang.process import ServerProcess

pytest_plugins = ["sglang_fixtures"]
pytestmark = pytest.mark.sglang


@in_loop
async def test_it_generates_for_who_has_the_key(sglang_server: ServerProcess) -> None:
    body = {"input_ids": [1, 7, 8], "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
    async with aiohttp.ClientSession() as http:
        async with http.post(f"{sglang_server.url}/generate", json=body) as response:
            assert response.status == 401
        async with http.post(f"{sglang_server.url}/generate", json=body, headers=sglang_server.headers) as response:
            assert len((await response.json())["output_ids"]) == 4


def test_its_key_is_in_no_command_line(sglang_server: ServerProcess) -> None:
    key = sglang_server.headers["Authorization"].removeprefix("Bearer ")
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
    assert any(b"launcher.py" in line for line in lines)
    assert not any(key.encode() in line for line in lines)


@in_loop
async def test_nothing_of_it_survives_the_kill_of_its_launcher(tmp_path: Path, tiny_qwen3: Path) -> None:
    server = cpu_server(tiny_qwen3, tmp_path / "log")
    await server.start()
    pids = processes(server.url)
    assert {"sglang::schedul", "sglang::detoken"} <= set(pids.values())
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    assert await all_gone(list(pids))
    assert not server.alive
    await server.stop()


@in_loop
async def test_an_unknown_argument_is_shown(tmp_path: Path, tiny_qwen3: Path) -> None:
    server = cpu_server(tiny_qwen3, tmp_path / "log", {"no_such_thing": 1})
    with pytest.raises(SamplerError, match=r"unrecognized arguments: --no-such-thing 1"):
        await server.start()
