"""Launching servers, with a stand-in for `sglang.launch_server` that starts in no time."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ParamSpec

import aiohttp
import pytest

from relax_gym.errors import ConfigError, SamplerError
from relax_gym_plugins.samplers.sglang import process
from relax_gym_plugins.samplers.sglang.process import ServerProcess, reserve_port, server_environment, server_flags

P = ParamSpec("P")
STAND_IN = Path(__file__).with_name("sglang_stand_in")


def in_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """The test in an event loop of its own."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


def server(folder: Path, behaviour: str = "serve", *, timeout: float = 60.0, **options: Any) -> ServerProcess:
    env = {"PYTHONPATH": str(STAND_IN), "STAND_IN": behaviour, "STAND_IN_REPORT": str(folder / "report")}
    arguments = options.pop("arguments", {})
    python = options.pop("python", sys.executable)
    return ServerProcess(python, folder, arguments, log=folder / "logs/0.log", env=env, timeout=timeout, **options)


def report(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "report").read_text())
    return found


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:  # also when it ends while it is read
        return False


async def comes_true(condition: Callable[[], bool]) -> bool:
    for _ in range(400):
        if condition():
            return True
        await asyncio.sleep(0.05)
    return False


async def all_gone(pids: list[int]) -> bool:
    return await comes_true(lambda: not any(map(running, pids)))


async def get(url: str, headers: Mapping[str, str] | None = None) -> int:
    async with aiohttp.ClientSession() as http, http.get(url, headers=headers) as response:
        return response.status


@contextmanager
def foreign_server(port: int, *, status: int) -> Iterator[None]:
    """Somebody else's, who asked for this very port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    class Server(socketserver.TCPServer):
        allow_reuse_address = True

    with Server(("127.0.0.1", port), Handler) as foreign:
        thread = threading.Thread(target=foreign.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield
        foreign.shutdown()
        thread.join()


@in_loop
async def test_it_serves_with_its_own_key_and_stops_with_all_its_processes(tmp_path: Path) -> None:
    launched = server(tmp_path, arguments={"tp_size": 2})
    assert not launched.alive
    await launched.start()
    seen = report(tmp_path)
    assert launched.alive
    assert await get(f"{launched.url}/model_info", launched.headers) == 200
    assert await get(f"{launched.url}/model_info") == 401
    assert all(map(running, seen["pids"]))
    assert seen["argv"][-8:-2] == ["--host", "127.0.0.1", "--tp-size", "2", "--port", str(launched.port)]
    await launched.stop()
    await launched.stop()
    assert not launched.alive
    assert not any(map(running, seen["pids"]))


@in_loop
async def test_the_key_is_in_no_command_line_and_the_log_is_private(tmp_path: Path) -> None:
    launched = server(tmp_path)
    await launched.start()
    seen, key = report(tmp_path), launched.headers["Authorization"].removeprefix("Bearer ")
    await launched.stop()
    assert len(key) >= 32
    assert key in seen["argv"]
    assert key not in "".join([*seen["command_lines"], launched.command, *seen["environ"].values()])
    assert seen["stdin"] == ""
    assert launched.log.stat().st_mode & 0o077 == 0


@in_loop
async def test_started_again_it_has_a_new_key_and_keeps_the_old_log(tmp_path: Path) -> None:
    launched, keys = server(tmp_path), set()
    for _ in range(2):
        await launched.start()
        keys.add(launched.headers["Authorization"])
    await launched.stop()
    assert len(keys) == 2
    assert launched.log.read_text().count("launched with") == 2


@in_loop
async def test_stopping_what_never_started_is_fine(tmp_path: Path) -> None:
    await server(tmp_path).stop()


@in_loop
async def test_what_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "GRACE_SECONDS", 0.3)
    launched = server(tmp_path, "stubborn")
    await launched.start()
    await launched.stop()
    assert await all_gone(report(tmp_path)["pids"])


@in_loop
async def test_modules_beside_the_launcher_do_not_hide_those_of_sglang(tmp_path: Path) -> None:
    launched = server(tmp_path)
    await launched.start()
    await launched.stop()
    assert str(process.LAUNCHER.parent) not in report(tmp_path)["path"]


@pytest.mark.parametrize("status", [200, 401, 503])
@in_loop
async def test_k94_a_foreign_server_at_our_port_is_not_taken_for_ours(tmp_path: Path, status: int) -> None:
    taken: list[int] = []
    with ExitStack() as stack:

        def reserve(host: str) -> socket.socket:
            held = reserve_port(host)
            if not taken:
                taken.append(held.getsockname()[1])
                stack.enter_context(foreign_server(taken[0], status=status))
            return held

        launched = server(tmp_path, reserve=reserve)
        await launched.start()
        assert launched.port != taken[0]
        assert await get(f"{launched.url}/model_info", launched.headers) == 200
        await launched.stop()


@in_loop
async def test_k94_giving_up_names_the_port(tmp_path: Path) -> None:
    launched = server(tmp_path, "dist")
    with pytest.raises(SamplerError, match=r"found a port taken \(torch.*29500.*\) at each of 4 launches; see what"):
        await launched.start()
    assert launched.log.read_text().count("launched with") == 4
    assert not launched.alive


def test_k94_nobody_is_given_a_reserved_port() -> None:
    with reserve_port("127.0.0.1") as held:
        port = held.getsockname()[1]
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with socket.socket() as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(("127.0.0.1", port))
            listening.listen()


@in_loop
async def test_one_that_ends_early_shows_why(tmp_path: Path) -> None:
    launched = server(tmp_path, "die", arguments={"dtype": "float32"})
    with pytest.raises(SamplerError) as caught:
        await launched.start()
    message = str(caught.value)
    assert message.startswith("SGLang ended before it was ready; most often an argument in sampler.server_args")
    assert f"-m sglang.launch_server --model-path {tmp_path} --host 127.0.0.1 --dtype float32 --port" in message
    assert "  line 16\n" in message and "line 15\n" not in message
    assert message.endswith("  launcher: SGLang ended with status 3")
    assert not launched.alive


@in_loop
async def test_errors_do_not_show_the_key(tmp_path: Path) -> None:
    launched = server(tmp_path, "hang", timeout=3.0)
    with pytest.raises(SamplerError) as caught:
        await launched.start()
    assert "SGLang is not ready after 3 s; if it only needs longer, raise sampler.launch_timeout" in str(caught.value)
    assert "launched with <key>" in str(caught.value)
    assert await all_gone(report(tmp_path)["pids"])


@pytest.mark.parametrize(
    ("python", "message"),
    [
        ("/nowhere/python", "cannot run /nowhere/python: No such file or directory; set sampler.python to"),
        (sys.executable, "SGLang is not installed; set sampler.python to an interpreter that has it"),
    ],
)
@in_loop
async def test_no_sglang(tmp_path: Path, python: str, message: str) -> None:
    launched = ServerProcess(
        python,
        tmp_path,
        {},
        log=tmp_path / "log",
        env={"PYTHONPATH": str(tmp_path), "PYTHONNOUSERSITE": "1"},
        timeout=60,
    )
    with pytest.raises(SamplerError, match=message):
        await launched.start()


@in_loop
async def test_a_cancelled_start_leaves_nothing(tmp_path: Path) -> None:
    launched = server(tmp_path, "hang")
    starting = asyncio.create_task(launched.start())
    assert await comes_true((tmp_path / "report").exists)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert await all_gone(report(tmp_path)["pids"])


@pytest.mark.parametrize("victim", [0, 1], ids=["server", "launcher"])
@in_loop
async def test_when_one_of_its_processes_is_killed_none_is_left(tmp_path: Path, victim: int) -> None:
    launched = server(tmp_path)
    await launched.start()
    pids = report(tmp_path)["pids"]
    os.kill(pids[victim], signal.SIGKILL)
    assert await all_gone(pids[:2])
    assert not launched.alive
    await launched.stop()
    assert await all_gone(pids)


PARENT = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_sglang_process import server
async def main():
    launched = server(Path(sys.argv[1]))
    await launched.start()
    print("ready", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def test_nothing_outlives_a_killed_parent(tmp_path: Path) -> None:
    code = PARENT.format(tests=str(Path(__file__).parent))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, env=env) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        pids = report(tmp_path)["pids"]
        assert all(map(running, pids))
        parent.kill()
    assert asyncio.run(all_gone(pids))


def test_k95_keys_endpoints_and_process_groups_stay_out_of_the_environment() -> None:
    ours = {
        "PATH": "/bin",
        "HOME": "/home/a",
        "CUDA_VISIBLE_DEVICES": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "SGLANG_API_KEY_CHECK": "1",
        "OPENAI_BASE_URL": "http://a",
        "OPENAI_API_KEY": "k",
        "JUDGE_API_KEY": "k",
        "HF_TOKEN": "k",
        "AWS_SECRET_ACCESS_KEY": "k",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "PYTHONPATH": "/ours",
        "no_proxy": "a.b",
    }
    given = {"HF_TOKEN": "mine", "A": "b"}
    kept = {name: ours[name] for name in ("PATH", "HOME", "CUDA_VISIBLE_DEVICES", "TOKENIZERS_PARALLELISM")}
    added = {"SGLANG_API_KEY_CHECK": "1", "PYTHONUNBUFFERED": "1", "no_proxy": "a.b,::1", "NO_PROXY": "::1", **given}
    assert server_environment(ours, given, host="::1", same_python=False) == {**kept, **added}
    assert server_environment(ours, given, host="::1", same_python=True) == {**kept, **added, "PYTHONPATH": "/ours"}


@in_loop
async def test_k95_a_server_does_not_see_our_endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://a")
    launched = server(tmp_path)
    await launched.start()
    await launched.stop()
    assert "OPENAI_BASE_URL" not in report(tmp_path)["environ"]


@pytest.mark.parametrize(
    ("arguments", "flags"),
    [
        ({}, []),
        ({"tp_size": 2}, ["--tp-size", "2"]),
        ({"tp-size": 2}, ["--tp-size", "2"]),
        ({"mem_fraction_static": 0.5, "dtype": "bfloat16"}, ["--mem-fraction-static", "0.5", "--dtype", "bfloat16"]),
        ({"sleep_on_idle": True, "a": False, "b": None, "c": []}, ["--sleep-on-idle"]),
        ({"cuda_graph_bs": [1, 2]}, ["--cuda-graph-bs", "1", "2"]),
        ({"lora_paths": [{"name": "a"}, "b"]}, ["--lora-paths", '{"name": "a"}', "b"]),
        ({"json_model_override_args": {"a": [1]}}, ["--json-model-override-args", '{"a": [1]}']),
        ({"nccl_port": 0}, ["--nccl-port", "0"]),
        ({"schedule_policy": ""}, ["--schedule-policy", ""]),
    ],
)
def test_arguments(arguments: dict[str, object], flags: list[str]) -> None:
    assert server_flags(arguments) == flags


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("port", "sampler.server_args.port cannot be set: the sampler chooses it; remove it"),
        ("host", "sampler.server_args.host cannot be set"),
        ("model_path", "sampler.server_args.model_path cannot be set"),
        ("api-key", "sampler.server_args.api-key cannot be set"),
        ("admin_api_key", "cannot be set: weight updates would need it"),
        ("config", "cannot be set: give what the file says"),
        ("tokenizer_worker_num", "cannot be set: SGLang takes no key"),
        ("ssl_keyfile", "attach with urls"),
        ("--tp", "'--tp' is no name of an argument; write it like tp_size"),
    ],
)
def test_arguments_that_cannot_be_given(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        server(tmp_path, arguments={name: 1})
