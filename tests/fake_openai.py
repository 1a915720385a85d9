"""A scripted server that speaks the OpenAI API. It is strict about messages, as the real one is."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from aiohttp import web

Body = dict[str, Any]
PARTS = {"text", "image_url", "input_audio", "video_url"}


class FakeOpenAI:
    """`answer` makes the assistant's message of a request. `faults` are taken one for each request that comes.

    Faults: None is none, an int that HTTP status, a pair that status and a Retry-After (below 400: a Location), "hang"
    never answers, "drop" closes the connection, other text is the body of a 200, and a dict its JSON.
    """

    def __init__(self, answer: Callable[[Body], Body], *, key: str | None = None) -> None:
        self.answer, self.key = answer, key
        self.faults: list[Any] = []
        self.bodies: list[Body] = []
        self.headers: list[dict[str, str]] = []
        self.most_at_once = self._now = 0
        self._came = threading.Condition()
        self.refuse: Callable[[Body], str | None] = lambda body: None
        self.url = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[FakeOpenAI]:
        """Serve on a port of the loopback interface, in this event loop."""
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._complete)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        try:
            yield self
        finally:
            await runner.cleanup()

    @contextmanager
    def in_thread(self) -> Iterator[FakeOpenAI]:
        """Serve in an event loop of its own."""
        ready, loop = threading.Event(), asyncio.new_event_loop()
        stop = asyncio.Event()

        async def serve() -> None:
            async with self.serving():
                ready.set()
                await stop.wait()

        thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
        thread.start()
        ready.wait()
        try:
            yield self
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join()
            loop.close()

    def wait_for(self, requests: int) -> None:
        """From another thread: wait until so many requests have come."""
        with self._came:
            assert self._came.wait_for(lambda: len(self.bodies) >= requests, timeout=60)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        with self._came:
            self.bodies.append(body)
            self._came.notify_all()
        self.headers.append(dict(request.headers))
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        try:
            await asyncio.sleep(0)
            return await self._respond(request, body)
        finally:
            self._now -= 1

    async def _respond(self, request: web.Request, body: Body) -> web.StreamResponse:
        given = request.headers.get("Authorization")
        if self.key and given != f"Bearer {self.key}":
            return _error(401, f"Incorrect API key provided: {(given or '').removeprefix('Bearer ')}.")
        fault = self.faults.pop(0) if self.faults else None
        if fault is not None:
            return await _faulty(request, fault)
        if problem := self.refuse(body) or check(body["messages"]):
            return _error(400, problem)
        message = {"role": "assistant", **self.answer(body)}
        finish = message.pop("finish_reason", "tool_calls" if message.get("tool_calls") else "stop")
        return web.json_response(
            {
                "id": "chatcmpl-1",
                "object": "chat.completion",
                "model": body["model"],
                "choices": [{"index": 0, "message": message, "finish_reason": finish}],
                "usage": {"prompt_tokens": 10 * len(body["messages"]), "completion_tokens": 3, "total_tokens": 13},
            }
        )


async def _faulty(request: web.Request, fault: Any) -> web.StreamResponse:
    if fault == "hang":
        await asyncio.Event().wait()
    if fault == "drop":
        assert request.transport is not None
        request.transport.abort()
    if isinstance(fault, tuple):
        status, where_or_when = fault
        header = "Location" if status < 400 else "Retry-After"
        return _error(status, "slow down", {header: str(where_or_when)})
    if isinstance(fault, int):
        return _error(fault, f"scripted {fault}")
    return web.Response(text=fault if isinstance(fault, str) else json.dumps(fault), content_type="application/json")


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "scripted"}}, status=status, headers=headers)


def check(messages: list[Body]) -> str | None:
    """What is wrong with messages, in the manner of OpenAI's own server; None when nothing is."""
    open_calls: list[str] = []
    for at, message in enumerate(messages):
        if message["role"] == "tool":
            if message.get("tool_call_id") not in open_calls:
                return f"messages[{at}]: a message of role 'tool' must answer a preceding message with 'tool_calls'"
            open_calls.remove(message["tool_call_id"])
            if not isinstance(message["content"], str):
                return f"messages[{at}]: content of a tool must be text"
            continue
        if open_calls:
            return f"messages[{at}]: tool_call_ids did not have response messages: {open_calls}"
        if problem := _check_content(message):
            return f"messages[{at}]: {problem}"
        open_calls = [call["id"] for call in message.get("tool_calls") or ()]
        for call in message.get("tool_calls") or ():
            json.loads(call["function"]["arguments"])
    return None


def _check_content(message: Body) -> str | None:
    content = message.get("content")
    if content is None:
        return None if message.get("tool_calls") else "content is missing"
    if isinstance(content, str):
        return None
    unknown = [part for part in content if part.get("type") not in PARTS or part["type"] not in part]
    return f"unknown parts {unknown!r:.200}" if unknown or message["role"] != "user" else None
