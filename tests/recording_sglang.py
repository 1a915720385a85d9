"""A scripted SGLang server that keeps what it was told, and what tests ask of it."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web
from fake_sglang import FakeSGLang
from test_sglang_sampler import PROMPT

from relax_gym.sampler import SamplingParams
from relax_gym_plugins.samplers.sglang.sampler import SGLangSampler


class Recording(FakeSGLang):
    """Keeps what it was told, and holds one kind of call back until `gate` is set, after it has had its effect."""

    def __init__(self, *, dp_size: int = 1, held_back: str = "", **options: Any) -> None:
        super().__init__(**options)
        self.dp_size, self.held_back = dp_size, held_back
        self.told: list[tuple[str, Any]] = []
        self.running_when_told: list[tuple[str, int]] = []
        self.reached, self.gate, self.flushing = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.slow_abort = False

    async def _server_info(self, http: web.Request) -> web.Response:
        sizes = {"tp_size": 1, "dp_size": self.dp_size, "context_length": 1000}
        return web.json_response({"version": self.release, "random_seed": self.seed, **sizes})

    async def _control(self, http: web.Request) -> web.Response:
        name = http.match_info["control"]
        self.told.append((name, await http.json() if http.body_exists else {}))
        self.running_when_told.append((name, len(self.running)))
        if name == "abort_request" and self.slow_abort:
            self.aborting = asyncio.create_task(self._abort_later())
            return web.json_response({})
        if name == "flush_cache" and self.running:
            self.flushing.set()
            if "timeout" not in http.query:
                return web.json_response({"success": False, "message": "requests run"}, status=400)
            await self.until_idle()
        answer = await super()._control(http)
        if name == self.held_back:
            self.reached.set()
            await self.gate.wait()
        return answer

    async def _abort_later(self) -> None:
        await self.flushing.wait()
        self._abort("")
        await self._tell()


async def ask(sampler: SGLangSampler, length: int = 3, **params: Any) -> Any:
    return await sampler.open_session().generate(PROMPT, SamplingParams(max_new_tokens=length, **params))


async def held(server: FakeSGLang, sampler: SGLangSampler, length: int = 3, tokens: int = 1) -> asyncio.Task[Any]:
    """A request of `length` tokens, which waits in the server with the first `tokens` of them until it may `go`."""
    server.hold = tokens
    running = len(server.running)
    task = asyncio.ensure_future(ask(sampler, length))
    await server.until(running=running + 1, tokens=tokens)
    return task
