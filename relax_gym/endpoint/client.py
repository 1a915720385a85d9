"""HTTP client of an OpenAI-compatible endpoint: POST {url}/chat/completions, with retries and deadlines."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import re
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from relax_gym.endpoint.replies import Reply, ReplyError, read_reply
from relax_gym.errors import ConfigError, RelaxGymError
from relax_gym.redaction import MASK
from relax_gym.types import Message, Tool

log = logging.getLogger("relax_gym")
PATH = "/chat/completions"
PASSING = frozenset({408, 409, 425, 429})
"""Statuses below 500 that another try may not meet."""
FOR_ALL = frozenset({401, 402, 404, 405})
"""Statuses that every request would meet."""
IDLE_SECONDS = 3.0  # uvicorn closes idle connections after 5 s; a client that does so first never meets a closed one
LONGEST_WAIT = 60.0
TOO_LONG = re.compile(
    r"context[_ ]length|context window|maximum allowed length|(prompt|input|request)\b.{0,80}\btoo (long|large)|"
    r"(prompt|input)\b.{0,80}\b(longer than|exceeds?)\b",
    re.IGNORECASE | re.DOTALL,
)


class EndpointError(RelaxGymError):
    """A request failed for good. `status` is the HTTP status, None when there was no answer that could be used."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status

    @property
    def for_all(self) -> bool:
        """Whether every other request would fail in the same way: a wrong key, URL or model."""
        return self.status in FOR_ALL


class PromptTooLong(EndpointError):
    """The conversation does not fit into the model's context."""


class _Passing(Exception):
    """Another try may go better; `wait` is how many seconds the server wants it to wait, None if it did not say."""

    def __init__(self, message: str, status: int | None = None, wait: float | None = None) -> None:
        super().__init__(message)
        self.status, self.wait = status, wait


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointConfig:
    """Where requests go and how long is tried. Times in seconds.

    Attributes:
        url: everything before `/chat/completions`.
        key_env: name of the environment variable that holds the key; None sends none.
        timeout: limit of one try.
        deadline: limit of a request with all its tries and the waits between them.
        retries: most tries after the first.
        backoff: the first wait; each is twice the one before, at most a minute, and then shortened by up to a half at
            random. A server's Retry-After comes first if it is longer.
        command_line: whether messages call options as the command line does (`--key-env`) or as a config (`key_env`).
    """

    url: str
    model: str
    key_env: str | None = None
    timeout: float = 300.0
    deadline: float = 900.0
    retries: int = 8
    backoff: float = 0.5
    body: Mapping[str, Any] = field(default_factory=dict)
    command_line: bool = True

    def called(self, option: str) -> str:
        """An option's name, for messages."""
        return f"--{option.replace('_', '-')}" if self.command_line else option


class Endpoint:
    """Asks for completions. One client serves all episodes, in one event loop.

    Attributes:
        answered: whether any request ever was.
        failed_in_row: requests that have failed for good since one was answered.

    Raises:
        ConfigError: the URL is none, holds a password, or the environment variable of the key is not set.
    """

    def __init__(self, config: EndpointConfig, *, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep) -> None:
        self.config = config
        self.url = base_url(config.url, called=config.called) + PATH
        self.answered, self.failed_in_row = False, 0
        self._key = _key(config)
        self._sleep = sleep
        self._random = random.Random()
        self._http: aiohttp.ClientSession | None = None

    async def complete(self, messages: Sequence[Message], tools: Sequence[Tool] = (), seed: int | None = None) -> Reply:
        """What the model answers.

        Raises:
            PromptTooLong: it says that the messages are too many for its context.
            EndpointError: refused, or still failing after all retries; names URL, status and the server's message.
        """
        body: dict[str, Any] = {"model": self.config.model, "messages": list(messages), **self.config.body}
        if tools:
            body["tools"] = list(tools)
        if seed is not None:
            body["seed"] = seed
        try:
            reply = await self._retried(body)
        except PromptTooLong:
            raise
        except EndpointError:
            self.failed_in_row += 1
            raise
        self.answered, self.failed_in_row = True, 0
        return reply

    async def aclose(self) -> None:
        """Close connections. Idempotent."""
        http, self._http = self._http, None
        if http is not None:
            await http.close()

    async def _retried(self, body: Mapping[str, Any]) -> Reply:
        clock = asyncio.get_running_loop().time
        end, tries = clock() + self.config.deadline, 0
        while True:
            tries += 1
            try:
                return await self._try(body, min(self.config.timeout, end - clock()))
            except _Passing as fault:
                wait = max(self._backoff(tries), fault.wait or 0.0)
                if tries > self.config.retries or wait >= end - clock():
                    raise self._failed(fault, tries) from fault
                log.info("%s; trying again in %.1f s", fault, wait)
                await self._sleep(wait)
                if clock() >= end:  # it took longer; a limit of 0 s would be none to aiohttp
                    raise self._failed(fault, tries) from fault

    async def _try(self, body: Mapping[str, Any], timeout: float) -> Reply:
        if self._http is None:
            self._http = self._connect()
        limit = aiohttp.ClientTimeout(total=timeout, sock_connect=min(timeout, 30.0))
        try:
            # A redirected POST would become a GET, and could take the key elsewhere.
            async with self._http.post(self.url, json=body, timeout=limit, allow_redirects=False) as response:
                text = await response.text(errors="replace")
                if response.status != 200:
                    raise self._refused(response.status, text, response.headers)
        except TimeoutError as error:
            raise _Passing(f"{self.url} did not answer within {timeout:g} s") from error
        except (aiohttp.InvalidURL, aiohttp.ClientConnectorCertificateError) as error:
            raise EndpointError(f"{self.url}: {error}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _Passing(f"{self.url}: {type(error).__name__}: {self._safe(str(error))}") from error
        try:
            return read_reply(json.loads(text))
        except (ValueError, RecursionError) as error:
            raise _Passing(f"{self.url} answered 200 with no JSON: {self._safe(text[:200])!r}", 200) from error
        except ReplyError as error:
            raise _Passing(f"{self.url} answered 200, but {self._safe(str(error))}", 200) from error

    def _refused(self, status: int, text: str, headers: Mapping[str, str]) -> Exception:
        said, called = self._safe(server_message(text)), self.config.called
        message = f"{self.url} answered {status}: {said}"
        if status >= 500 or status in PASSING:
            return _Passing(message, status, retry_after(headers.get("Retry-After")))
        if status in (400, 413, 422) and TOO_LONG.search(said):
            return PromptTooLong(f"{message} (a smaller {called('max_tokens')} leaves more room)", status=status)
        if 300 <= status < 400:
            message += f" (moved to {headers.get('Location')}; give that address with {called('endpoint')})"
        elif status in (401, 403):
            sent = f"the key in {self.config.key_env} was sent" if self._key else "no key was sent"
            message += f" ({sent}; {called('key_env')} names the environment variable that holds it)"
        elif status == 404:
            message += (
                f" (model {self.config.model!r}; {called('endpoint')} is what stands before {PATH}, most often …/v1)"
            )
        return EndpointError(message, status=status)

    def _failed(self, fault: _Passing, tries: int) -> EndpointError:
        asked = f"; the server asks to wait {fault.wait:g} s" if fault.wait else ""
        config = self.config
        return EndpointError(
            f"{fault} (tried {tries} times, at most {config.retries + 1} within {config.deadline:g} s{asked}; "
            f"{config.called('retries')} and {config.called('deadline')} give more)",
            status=fault.status,
        )

    def _backoff(self, tries: int) -> float:
        return min(self.config.backoff * 2.0 ** (tries - 1), LONGEST_WAIT) * self._random.uniform(0.5, 1.0)

    def _safe(self, text: str) -> str:
        """What a server or a library said, without the key: some repeat it."""
        return text.replace(self._key, MASK) if self._key else text

    def _connect(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS, socket_factory=_socket_with_keepalive)
        return aiohttp.ClientSession(
            connector=connector, headers={"Authorization": f"Bearer {self._key}"} if self._key else None
        )


def base_url(url: str, *, called: Callable[[str], str] = "--{}".format) -> str:
    """The URL without `/chat/completions` at its end. Raises ConfigError when it is no address, or holds a secret."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{called('endpoint')} {url!r} is no URL; give one like http://localhost:30000/v1")
    if parts.username or parts.password or parts.query:
        raise ConfigError(
            f"{called('endpoint')} for {parts.hostname} holds a name, password or query; put the key into an "
            f"environment variable and name that with {called('key_env')}"
        )
    return url.rstrip("/").removesuffix(PATH)


def retry_after(value: str | None) -> float | None:
    """Seconds that a Retry-After header asks to wait: it is a number of them, or a date (RFC 9110, 10.2.3)."""
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return None


def server_message(text: str) -> str:
    """What a server says about an error, out of the forms it says it in."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text.strip()[:500]
    for key in ("error", "message", "detail"):
        inner = found.get(key) if isinstance(found, dict) else None
        if isinstance(inner, dict):
            inner = inner.get("message")
        if isinstance(inner, str):
            return inner[:500]
    return text[:500]


def _key(config: EndpointConfig) -> str | None:
    name = config.key_env
    if name is None:
        return None
    key = os.environ.get(name, "").strip()
    if not key:
        raise ConfigError(
            f"{config.called('key_env')} {name}: the environment variable is not set; set it to the key of the endpoint"
        )
    return key


def _socket_with_keepalive(address: Any) -> socket.socket:
    """A peer that vanished without a word is noticed within a minute, not never."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):  # not on every system
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made
