"""Launches one SGLang server and owns it: its port, its key, its log and its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import aiohttp

from relax_gym.errors import ConfigError, SamplerError

LAUNCHER = Path(__file__).with_name("launcher.py")
ATTEMPTS = 4
POLL_SECONDS = 0.2
PROBE = aiohttp.ClientTimeout(total=10.0)
GRACE_SECONDS = 30.0
SHOWN_LINES, SEARCHED_LINES = 15, 400

OURS = {
    **dict.fromkeys(("host", "port", "model-path", "model", "api-key"), "the sampler chooses it"),
    "admin-api-key": "weight updates would need it in place of the sampler's own key",
    "config": "give what the file says in sampler.server_args",
    "tokenizer-worker-num": "SGLang takes no key with several tokenizer workers",
    **dict.fromkeys(("ssl-keyfile", "ssl-certfile"), "launched servers are spoken to without TLS; attach with urls"),
}
"""Arguments that a launched server does not take from the user, and why."""

PORT_TAKEN = re.compile(
    r"address already in use|EADDRINUSE|port is already in use|used by a process already|at \d+ is not available", re.I
)
NOT_INHERITED = re.compile(
    r"OPENAI_.*"
    r"|(?!SGLANG_)(.*_)?(API_?KEY|ACCESS_KEY|TOKEN|SECRET|PASSWORD)(_.*)?"
    r"|TORCHELASTIC_.*|MASTER_(ADDR|PORT)|((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|ROLE_NAME"  # the learner's own group
)
OF_ANOTHER_PYTHON = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


class PortTakenError(Exception):
    """Somebody else has a port that a server wanted. Never leaves this module."""


def server_flags(arguments: Mapping[str, object]) -> list[str]:
    """Command line arguments: `{tp_size: 2}` → `--tp-size 2`; true is a bare flag, false and None are none, a list is
    several values, a mapping is JSON.

    Raises:
        ConfigError: one that the launcher sets itself, or a name that is none.
    """
    flags: list[str] = []
    for given, value in arguments.items():
        name = given.replace("_", "-")
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9-]*", name):
            raise ConfigError(f"sampler.server_args: {given!r} is no name of an argument; write it like tp_size")
        if name in OURS:
            raise ConfigError(f"sampler.server_args.{given} cannot be set: {OURS[name]}; remove it")
        if value is None or value is False or value == []:
            continue
        values = value if isinstance(value, list | tuple) else () if value is True else (value,)
        flags += [f"--{name}", *(json.dumps(item) if isinstance(item, Mapping) else str(item) for item in values)]
    return flags


def server_environment(
    inherited: Mapping[str, str], given: Mapping[str, str], *, host: str, same_python: bool
) -> dict[str, str]:
    """The environment of a server: ours without keys, endpoints and what belongs to the learner's process group or to
    another interpreter, then what the user gives."""
    kept = {name: value for name, value in inherited.items() if not NOT_INHERITED.fullmatch(name)}
    if not same_python:
        kept = {name: value for name, value in kept.items() if name not in OF_ANOTHER_PYTHON}
    direct = {  # SGLang warms itself up over HTTP, which must not go through a proxy
        name: ",".join(filter(None, (inherited.get(name), host))) for name in ("no_proxy", "NO_PROXY")
    }
    return {**kept, **direct, "PYTHONUNBUFFERED": "1", **given}


def reserve_port(host: str) -> socket.socket:
    """A socket that holds a free port. As long as it is open and does not listen, nobody is given this port by chance,
    yet a server that asks for it by number (with SO_REUSEADDR, as all do) gets it."""
    held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((host, 0))
    return held


class ServerProcess:
    """One `python -m sglang.launch_server`. It and all its processes end when `stop` is called or this process ends,
    however that happens."""

    def __init__(
        self,
        python: str,
        model_path: Path,
        arguments: Mapping[str, object],
        *,
        log: Path,
        env: Mapping[str, str],
        timeout: float,
        host: str = "127.0.0.1",
        reserve: Callable[[str], socket.socket] = reserve_port,
    ) -> None:
        """`timeout` is the seconds until the server must be ready. Raises ConfigError for bad `arguments`."""
        self.host, self.port, self.log = host, 0, log
        self._python, self._timeout, self._reserve = python, timeout, reserve
        self._flags = ["--model-path", str(model_path), "--host", host, *server_flags(arguments)]
        same = os.path.abspath(python) == os.path.abspath(sys.executable)
        self._env = server_environment(os.environ, env, host=host, same_python=same)
        self._key = ""
        self._log_start = 0
        self._process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        """Where it serves, once `start` has returned."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def headers(self) -> dict[str, str]:
        """What requests must carry: a random key, new at each start."""
        return {"Authorization": f"Bearer {self._key}"}

    @property
    def command(self) -> str:
        """What is run, as one would type it. Without the key."""
        return shlex.join([self._python, "-m", "sglang.launch_server", *self._flags, "--port", str(self.port)])

    @property
    def pid(self) -> int | None:
        """Of the launcher, which is also the number of the process group that all the server's processes are in."""
        return self._process.pid if self._process else None

    @property
    def alive(self) -> bool:
        """Whether it runs, ready or not."""
        process = self._process
        if process is None or process.returncode is not None:
            return False
        # not reaped yet: as long as its pid is taken, the number of its process group cannot become another's
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    async def start(self) -> None:
        """Launch it and wait until it serves. After `stop` it can be started again.

        Raises:
            SamplerError: it cannot be run, ended, or is not ready in time; with the last lines of its log.
        """
        deadline = time.monotonic() + self._timeout
        await self.stop()
        try:
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    with self._reserve(self.host) as held:
                        self._spawn(held.getsockname()[1])
                        await self._until_ready(deadline)
                    return
                except PortTakenError as error:
                    self._kill()
                    if attempt == ATTEMPTS:
                        raise self._port_error(error) from error
        except BaseException:
            self._kill()
            raise

    async def stop(self) -> None:
        """End it and all its processes, and wait for that. Idempotent."""
        process = self._process
        if process is None:
            return
        try:
            if self.alive:
                process.terminate()  # the launcher, which tells SGLang to end in good order
                await _until(lambda: not self.alive, GRACE_SECONDS)
        finally:
            self._kill()
        await _until(lambda: not _runs(process.pid), GRACE_SECONDS)

    def _spawn(self, port: int) -> None:
        self.port, self._key = port, secrets.token_hex(24)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        # SGLang writes its key to its log
        with open(os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as output:
            self._log_start = os.fstat(output.fileno()).st_size
            command = [self._python, str(LAUNCHER), str(os.getpid()), *self._flags, "--port", str(port)]
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    env=self._env,
                    text=True,
                    start_new_session=True,
                )
            except OSError as error:
                raise SamplerError(
                    f"cannot run {self._python}: {error.strerror}; set sampler.python to an interpreter that has SGLang"
                ) from error
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(self._key + "\n")

    async def _until_ready(self, deadline: float) -> None:
        async with aiohttp.ClientSession(timeout=PROBE) as http:
            while not await self._serves(http):
                if not self.alive:
                    self._raise_ended()
                if any(
                    f", {self.port})" in line and PORT_TAKEN.search(line) for line in self._last_lines(SEARCHED_LINES)
                ):
                    raise PortTakenError(f"port {self.port} taken")  # SGLang has seen it too, but hangs on its way out
                if time.monotonic() > deadline:
                    raise self._error(
                        f"is not ready after {self._timeout:g} s",
                        "if it only needs longer, raise sampler.launch_timeout",
                    )
                await asyncio.sleep(POLL_SECONDS)

    async def _serves(self, http: aiohttp.ClientSession) -> bool:
        """Whether our server is ready. Only ours takes its key and nothing else.

        Raises:
            PortTakenError: another server answers.
        """
        try:
            without, ours = await self._status(http, "/model_info"), await self._status(http, "/model_info", key=True)
            if ours >= 500:
                return False
            if (without, ours) != (401, 200):
                raise PortTakenError(f"another server at port {self.port}")
            return await self._status(http, "/health") == 200
        except (aiohttp.ClientError, OSError):  # also TimeoutError
            return False

    async def _status(self, http: aiohttp.ClientSession, path: str, *, key: bool = False) -> int:
        async with http.get(self.url + path, headers=self.headers if key else None, allow_redirects=False) as response:
            return response.status

    def _raise_ended(self) -> None:
        lines = self._last_lines(SEARCHED_LINES)
        if taken := next(filter(PORT_TAKEN.search, lines), None):
            raise PortTakenError(f"a port taken ({taken.strip()})")
        if any("No module named 'sglang'" in line for line in lines):
            raise self._error("is not installed", "set sampler.python to an interpreter that has it")
        raise self._error("ended before it was ready", "most often an argument in sampler.server_args is the cause")

    def _port_error(self, error: PortTakenError) -> SamplerError:
        return self._error(
            f"found {error} at each of {ATTEMPTS} launches",
            "see what else on this machine takes ports; those that sampler.server_args names (nccl_port, "
            "dist_init_addr) must be free",
        )

    def _error(self, what: str, advice: str) -> SamplerError:
        lines = "\n".join(f"  {line}" for line in self._last_lines(SHOWN_LINES)) or "  (nothing)"
        return SamplerError(
            f"SGLang {what}; {advice}.\nCommand: {self.command}\nThe end of its log {self.log}:\n{lines}"
        )

    def _last_lines(self, count: int) -> list[str]:
        """Of what this launch has logged."""
        with open(self.log, "rb") as file:
            file.seek(self._log_start)
            text = file.read().decode(errors="replace").replace(self._key, "<key>")
        return text.splitlines()[-count:]

    def _kill(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _runs(group: int) -> bool:
    """Whether a process of the group is left. Dead ones that wait for whoever inherited them do not count."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            state, _, member_of, *_ = path.read_text().rpartition(")")[2].split()
            if int(member_of) == group and state not in "ZX":
                return True
    return False


async def _until(condition: Callable[[], bool], seconds: float) -> None:
    """Returns when it holds, or after so many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return
        await asyncio.sleep(0.05)
