"""A score from a service of one's own, over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import weakref
from typing import Any

import aiohttp

from relax_gym.endpoint.client import PASSING, base_url, retry_after, server_message
from relax_gym.errors import RewardError
from relax_gym.lines import json_text
from relax_gym.redaction import MASK
from relax_gym.run_folder import episode_record
from relax_gym.types import Trajectory

ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
LONGEST_WAIT, LONGEST_REPLY = 30.0, 2**20


class _Passing(Exception):
    """Another try may go better, after `wait` seconds if the service said so."""

    def __init__(self, message: str, wait: float | None = None) -> None:
        super().__init__(message)
        self.wait = wait


class Remote:
    """What the service at `url` answers to the episode; unscored when it does not.

    The episode is POSTed as a line of `episodes.jsonl`, with media named, not sent. The answer is a number, a list with
    one for each turn, null when it cannot say, or an object with one of these as `score` and other numbers to log.

    Connection errors, statuses from 500, 408, 409, 425 and 429, and answers that are no JSON are tried again, `retries`
    times at most, after waits that double from `backoff` seconds, or as long as Retry-After says. One try takes at most
    `timeout`, all of them `deadline` seconds. `key_env` names the environment variable that holds a bearer token.
    """

    key = "score"

    def __init__(
        self,
        *,
        url: str,
        key_env: str = "",
        timeout: float = 30.0,
        deadline: float = 60.0,
        retries: int = 4,
        backoff: float = 0.5,
        concurrency: int = 32,
    ) -> None:
        base_url(url, called=lambda option: {"endpoint": "remote: url"}.get(option, option))
        if not (min(timeout, deadline) > 0 and retries >= 0 and backoff >= 0 and concurrency >= 1):
            raise RewardError(
                "remote: timeout, deadline and concurrency must be above 0, retries and backoff 0 or more"
            )
        if key_env and not ENVIRONMENT_NAME.fullmatch(key_env):  # it may be the key, so it is not shown
            raise RewardError("remote: key_env is no name of an environment variable; put the key into one and name it")
        self._key = os.environ.get(key_env, "").strip()
        if key_env and not self._key:
            raise RewardError(f"remote: key_env {key_env}: the environment variable is not set; set it to the key")
        self.url, self.timeout, self.deadline, self.retries, self.backoff = url, timeout, deadline, retries, backoff
        self.concurrency = concurrency
        self._slots: weakref.WeakKeyDictionary[Any, asyncio.Semaphore] = weakref.WeakKeyDictionary()

    async def __call__(self, trajectory: Trajectory, /) -> Any:
        body = await asyncio.to_thread(_body, trajectory)
        slots = self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.concurrency))
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        async with slots, aiohttp.ClientSession(headers=headers) as http:
            answer = await self._retried(http, body)
        return answer if isinstance(answer, dict) else {self.key: answer}

    async def _retried(self, http: aiohttp.ClientSession, body: bytes) -> Any:
        clock = asyncio.get_running_loop().time
        end, tries = clock() + self.deadline, 0
        while True:
            tries += 1
            try:
                return await self._try(http, body, min(self.timeout, end - clock()))
            except _Passing as fault:
                wait = min(self.backoff * 2.0 ** (tries - 1), LONGEST_WAIT) * random.uniform(0.5, 1.0)
                wait = max(wait, fault.wait or 0.0)
                if tries > self.retries or wait >= end - clock():
                    raise RewardError(f"remote: {fault} (tried {tries} times)") from fault
                await asyncio.sleep(wait)

    async def _try(self, http: aiohttp.ClientSession, body: bytes, seconds: float) -> Any:
        limit = aiohttp.ClientTimeout(total=seconds)
        try:
            async with http.post(self.url, data=body, timeout=limit, allow_redirects=False) as response:
                text = (await self._read(response.content)).decode("utf-8", "replace")
                status, wait = response.status, retry_after(response.headers.get("Retry-After"))
        except TimeoutError as error:
            raise _Passing(f"{self.url} did not answer within {seconds:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _Passing(f"{self.url}: {type(error).__name__}: {self._safe(str(error))}") from error
        said = self._safe(server_message(text)[:200])
        if status >= 500 or status in PASSING:
            raise _Passing(f"{self.url} answered {status}: {said}", wait)
        if status != 200:
            raise RewardError(f"remote: {self.url} answered {status}: {said}; 200 with a score is expected")
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _Passing(f"{self.url} answered 200 with no JSON: {said!r}") from error

    async def _read(self, content: aiohttp.StreamReader) -> bytes:
        """All of it; `content.read` gives what has come so far."""
        answer = bytearray()
        async for part in content.iter_any():
            answer += part
            if len(answer) > LONGEST_REPLY:
                raise RewardError(
                    f"remote: {self.url} answered with more than {LONGEST_REPLY} bytes; give a score only"
                )
        return bytes(answer)

    def _safe(self, text: str) -> str:
        """What was said without the key: some services repeat it."""
        return text.replace(self._key, MASK) if self._key else text


def _body(trajectory: Trajectory) -> bytes:
    return json_text(episode_record(trajectory)).encode("utf-8", "backslashreplace")
