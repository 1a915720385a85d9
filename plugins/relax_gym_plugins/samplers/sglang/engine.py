"""One SGLang server, spoken to over HTTP."""

from __future__ import annotations

import json
import re
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from relax_gym.errors import ConfigError, SamplerError

OLDEST = (0, 5, 15)
CONTROL_SECONDS = 60.0
FLUSH_SECONDS = 30
MEMORY = ("weights", "kv_cache")
IDLE_SECONDS = 3.0  # uvicorn closes idle connections after 5 s; a client that does so first never meets a closed one


class EngineError(SamplerError):
    """A server did not do what it was asked; `status` is its HTTP status, None when it did not answer."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status

    @property
    def refused(self) -> bool:
        """Whether the request itself is at fault, so that sending it again would not help."""
        return self.status is not None and 400 <= self.status < 500 and self.status not in (408, 429)


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """What this server's version can do, as found out, not assumed."""

    version: tuple[int, ...]
    update_session: bool
    loads: bool

    @property
    def retract(self) -> bool:
        """Whether requests may be retracted around an update: older servers die when they flush with some waiting."""
        return self.version > (0, 5, 20)


class Engine:
    """HTTP client of one server. Every call has a deadline; what fails raises EngineError with the server's URL."""

    def __init__(self, url: str, *, headers: Mapping[str, str] | None = None, ca_file: str | None = None) -> None:
        self.url = url
        self.info: dict[str, Any] = {}
        self.features = Features(version=(), update_session=False, loads=False)
        self.released: tuple[str, ...] = ()
        self.devices: tuple[str, ...] = ()
        self._released_by: Any = None
        self._versions: set[str] = set()
        self._headers, self._ca_file = dict(headers or {}), ca_file
        self._http: aiohttp.ClientSession | None = None

    def __str__(self) -> str:
        return self.url

    @property
    def tp_size(self) -> int:
        """GPUs that one copy of the model is spread over."""
        return int(self.info.get("tp_size") or 1)

    @property
    def dp_size(self) -> int:
        """Copies of the model behind this URL."""
        return int(self.info.get("dp_size") or 1)

    @property
    def max_context(self) -> int:
        """Most tokens of one request, prompt and completion together."""
        limits = [self.info.get(key) for key in ("max_req_input_len", "context_length", "max_total_num_tokens")]
        return min(int(limit) for limit in limits if limit)

    @property
    def capacity(self) -> int | None:
        """Tokens of all requests together that its cache holds, where it says so."""
        tokens = self.info.get("max_total_num_tokens")
        return int(tokens) * self.dp_size if tokens else None

    async def move(self, url: str, headers: Mapping[str, str]) -> None:
        """Speak to another URL from now on."""
        await self.aclose()
        self.released = ()
        self.url, self._headers = url, dict(headers)

    async def connect(self) -> None:
        """Find out what the server is.

        Raises:
            EngineError: it does not answer, or is too old.
        """
        self.info = await self.get("/server_info", missing="/get_server_info")
        version = tuple(int(part) for part in re.findall(r"\d+", str(self.info.get("version", "")))[:3])
        if version < OLDEST:
            raise EngineError(
                f"{self.url} is SGLang {self.info.get('version')}; 0.5.15 and newer are supported: upgrade the server"
            )
        paths = (await self.get("/openapi.json")).get("paths", {})
        self.features = Features(
            version=version, update_session="/begin_weight_update" in paths, loads="/v1/loads" in paths
        )
        await self._notice_restart()

    async def generate(self, body: Mapping[str, Any], *, timeout: float) -> Any:
        """POST /generate; the reply as it came."""
        return await self._call("POST", "/generate", body, timeout)

    async def post(self, path: str, body: Mapping[str, Any] | None = None, *, timeout: float = CONTROL_SECONDS) -> Any:
        """Any other POST. Raises EngineError also for a 200 that says `success: false`."""
        if body and "weight_version" in body:
            self._versions.add(str(body["weight_version"]))
        reply = await self._call("POST", path, body or {}, timeout)
        if isinstance(reply, Mapping) and reply.get("success") is False:
            raise EngineError(f"{self.url}{path}: {reply.get('message')}", status=200)
        return reply

    async def get(self, path: str, *, missing: str | None = None, timeout: float = CONTROL_SECONDS) -> Any:
        """GET; another path where the first does not exist."""
        try:
            return await self._call("GET", path, None, timeout)
        except EngineError as error:
            if missing is None or error.status != 404:
                raise
        return await self._call("GET", missing, None, timeout)

    async def pause(self, mode: str) -> None:
        """Stop generating: "abort" returns requests in flight with what they have, "retract" queues them again (servers
        that cannot do so abort), "keep" leaves them where they are."""
        mode = "abort" if self.aborts(mode) else mode
        await self.post("/pause_generation", {"mode": "in_place" if mode == "keep" else mode})

    def aborts(self, mode: str) -> bool:
        """Whether `pause` ends the requests in flight."""
        return mode == "abort" or (mode == "retract" and not self.features.retract)

    async def resume(self) -> None:
        """Go on after `pause`."""
        await self.post("/continue_generation")

    async def abort(self, rid: str) -> None:
        """End one request; it returns what it has. Servers abort all whose id begins with `rid`."""
        await self.post("/abort_request", {"rid": rid})

    async def abort_all(self) -> None:
        """End the requests that run or wait, as `abort`; it goes on with those that come later."""
        await self.post("/abort_request", {"rid": "", "abort_all": True})

    async def empty(self) -> None:
        """End all requests, even those that wait in a paused server; it is paused afterwards. What they return may be
        of weights of two versions."""
        await self.resume()  # a server that is paused in place never ends its requests, and then never resumes
        await self.pause("abort")

    async def flush(self) -> None:
        """Drop all cached keys, values and media features, once the requests that are being aborted have ended.

        Raises:
            EngineError: requests still run after some seconds.
        """
        await self.post(f"/flush_cache?timeout={FLUSH_SECONDS}")

    async def release(self) -> None:
        """Free the memory of weights, keys and values; they are lost. Raises EngineError if requests do not end."""
        held = [tag for tag in MEMORY if tag not in self.released]
        if not held:
            return
        if "kv_cache" in held:
            await self.flush()
        self._released_by, version = await self._process()
        self._versions = {version}
        await self.post("/release_memory_occupation", {"tags": held})
        self.released = MEMORY

    async def restore(self, tag: str) -> None:
        """Have the memory of "weights" or "kv_cache" again, if it was released. Raises EngineError if the server was
        started anew since."""
        if tag in self.released:
            if await self._notice_restart():
                raise EngineError(f"{self.url} was started anew while its memory was released")
            await self.post("/resume_memory_occupation", {"tags": [tag]})
            self.released = tuple(other for other in self.released if other != tag)

    async def _notice_restart(self) -> bool:
        """Whether another process than the one that released memory serves here. It has all of its memory, and dies
        when it is to resume what it never released."""
        if not self.released:
            return False
        process, version = await self._process()
        if process == self._released_by and version in self._versions:
            return False
        self.released = ()
        return True

    async def _process(self) -> tuple[Any, str]:
        """What tells a process from the next: a seed, which each draws that is given none, and whose weights it has."""
        info = await self.get("/server_info", missing="/get_server_info")
        model = await self.get("/model_info", missing="/get_model_info")
        return info.get("random_seed"), str(model.get("weight_version"))

    async def running(self) -> int:
        """Requests that the server has, waiting ones included."""
        if not self.features.loads:
            states = (await self.get("/server_info", missing="/get_server_info")).get("internal_states", [])
            return sum(int(state.get("num_running_reqs") or 0) for state in states)
        loads = (await self.get("/v1/loads"))["loads"]
        return sum(int(load["num_running_reqs"]) + int(load["num_waiting_reqs"]) for load in loads)

    async def aclose(self) -> None:
        """Close connections. Idempotent."""
        http, self._http = self._http, None
        if http is not None:
            await http.close()

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None, timeout: float) -> Any:
        """The reply's JSON, or its text when it is none."""
        if self._http is None:
            self._http = self._connect()
        limit = aiohttp.ClientTimeout(total=timeout, sock_connect=min(timeout, 30.0))
        try:
            data, headers = (None, None) if body is None else (orjson.dumps(body), {"Content-Type": "application/json"})
            async with self._http.request(
                method, self.url + path, data=data, headers=headers, timeout=limit
            ) as response:
                if response.status >= 400:
                    advice = "; give its key in the variable that sampler.api_key_env names"
                    raise EngineError(
                        f"{self.url}{path} answered {response.status}: {_message(await response.text())}"
                        f"{advice if response.status == 401 else ''}",
                        status=response.status,
                    )
                if response.content_type == "application/json":
                    return orjson.loads(await response.read())
                return await response.text()
        except TimeoutError as error:
            raise EngineError(f"{self.url}{path} did not answer within {timeout:g} s") from error
        except aiohttp.ClientConnectorCertificateError as error:
            raise EngineError(
                f"{self.url}{path}: {error.certificate_error}; name a file of certificates to trust in sampler.ca_file"
            ) from error
        except (aiohttp.ClientError, ValueError, OSError) as error:
            raise EngineError(f"{self.url}{path}: {type(error).__name__}: {error}") from error

    def _connect(self) -> aiohttp.ClientSession:
        try:
            trust = ssl.create_default_context(cafile=self._ca_file) if self.url.startswith("https") else True
        except OSError as error:  # also SSLError
            raise ConfigError(f"sampler.ca_file = {self._ca_file!r} is no file of certificates: {error}") from error
        connector = aiohttp.TCPConnector(
            limit=0, keepalive_timeout=IDLE_SECONDS, ssl=trust, socket_factory=_socket_with_keepalive
        )
        return aiohttp.ClientSession(connector=connector, headers=self._headers)


def _socket_with_keepalive(address: Any) -> socket.socket:
    """A peer that vanished without a word is noticed within a minute, not never."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):  # not on every system
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made


def _message(text: str) -> str:
    """What a server says about an error, out of the forms it says it in."""
    try:
        found = json.loads(text)
    except ValueError:
        return text.strip()[:500]
    for key in ("error", "message"):
        inner = found.get(key) if isinstance(found, dict) else None
        if isinstance(inner, dict):
            inner = inner.get("message")
        if isinstance(inner, str):
            return inner[:500]
    return text[:500]
