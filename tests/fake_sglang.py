"""A scripted server that speaks SGLang's HTTP API. Its tokens depend on the ids before them and on the weights only."""

from __future__ import annotations

import asyncio
import base64
import itertools
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from aiohttp import web

VOCABULARY = 100
SAMPLING = {
    "max_new_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty",
    "presence_penalty", "min_new_tokens", "n", "stop", "stop_token_ids", "logit_bias", "skip_special_tokens",
    "no_stop_trim", "sampling_seed", "ignore_eos",
}  # fmt: skip


def next_token(version: str, ids: list[int]) -> int:
    """What the "model" says after these ids; weights change what it says."""
    return (7 * ids[-1] + 3 * len(ids) + sum(map(ord, version))) % VOCABULARY


def log_softmax(version: str, ids: list[int]) -> list[float]:
    """Log-probs of what comes after these ids when they are read as a prompt."""
    logits = np.array([(next_token(version, ids) + 11 * id) % VOCABULARY / 20 for id in range(VOCABULARY)])
    found: list[float] = (logits - np.log(np.exp(logits).sum())).tolist()
    return found


def input_logprobs(version: str, body: dict[str, Any]) -> dict[str, Any]:
    """What a reply says of a prompt; of its first token, as it has nothing before it, None."""
    start, ids, top_k = body["logprob_start_len"], body["input_ids"], body.get("top_logprobs_num", 0)
    rows = [log_softmax(version, ids[:at]) for at in range(start + 1, len(ids))]
    found: dict[str, Any] = {
        "input_token_logprobs": [[None, ids[start], None]]
        + [[row[id], id, None] for row, id in zip(rows, ids[start + 1 :], strict=True)]
    }
    if top_k:
        best = [sorted(range(VOCABULARY), key=lambda id: -row[id])[:top_k] for row in rows]
        found["input_top_logprobs"] = [None] + [
            [[row[id], id, None] for id in ids] for row, ids in zip(rows, best, strict=True)
        ]
    return found


@dataclass(eq=False)
class Request:
    body: dict[str, Any]
    ids: list[int] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    finish: dict[str, Any] | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def asked(self) -> int:
        return int(self.body["sampling_params"]["max_new_tokens"])


class FakeSGLang:
    """`faults` are taken one for each /generate. `hold` stops every request after so many tokens until `go` is called.

    Faults: an int is that HTTP status, "hang" never answers, "drop" closes the connection, and a dict replaces members
    of the reply (None removes one; keys with a dot reach into meta_info).
    """

    def __init__(
        self, *, version: str = "0.5.23", update_session: bool = True, spans: bool = True, tokenizer: Any = None
    ) -> None:
        self.tokenizer = tokenizer
        self.release, self.update_session, self.spans = version, update_session, spans
        self.weight_version, self.seed = "default", 1
        self.faults: list[Any] = []
        self.control_faults: dict[str, list[int]] = {}
        self.bodies: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.running: dict[str, Request] = {}
        self.hold: int | None = None
        self.held = asyncio.Condition()
        self.paused = False
        self.key: str | None = None
        self.url = ""

    # Running ----------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def serving(self, port: int = 0, *, tls: ssl.SSLContext | None = None) -> AsyncIterator[FakeSGLang]:
        """Serve on a port of the loopback interface."""
        app = web.Application(middlewares=[self._check_key])
        app.router.add_get("/server_info", self._server_info)
        app.router.add_get("/model_info", self._model_info)
        app.router.add_get("/openapi.json", self._openapi)
        app.router.add_get("/v1/loads", self._loads)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/{control}", self._control)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port, ssl_context=tls)
        await site.start()
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await self.go()
            await runner.cleanup()

    @web.middleware
    async def _check_key(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        answer: web.StreamResponse = await handler(request)
        return answer

    async def until(self, running: int, tokens: int = 0) -> None:
        """Wait until so many requests run and each has so many tokens."""
        async with self.held:
            await self.held.wait_for(
                lambda: len(self.running) >= running and all(len(r.ids) >= tokens for r in self.running.values())
            )

    async def until_idle(self) -> None:
        """Wait until no request runs."""
        async with self.held:
            await self.held.wait_for(lambda: not self.running)

    async def go(self) -> None:
        """Let held requests go on."""
        self.hold = None
        await self._tell()

    async def _tell(self) -> None:
        async with self.held:
            self.held.notify_all()

    # Generating -------------------------------------------------------------------------------------------------------

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        self.bodies.append(body)
        fault = self.faults.pop(0) if self.faults else None
        if unknown := body["sampling_params"].keys() - SAMPLING:
            return web.json_response({"error": f"unexpected keys {sorted(unknown)}"}, status=400)
        if fault == "hang":
            await asyncio.Event().wait()
        if fault == "drop":
            assert http.transport is not None
            http.transport.abort()
        if isinstance(fault, int):
            return web.Response(status=fault, text="Internal Server Error")
        request = Request(body)
        rid = body.get("rid") or f"server-{len(self.bodies)}"
        self.running[rid] = request
        try:
            await self._run(request)
        finally:
            del self.running[rid]
            await self._tell()
        return web.json_response(_changed(self._reply(request), fault if isinstance(fault, dict) else {}))

    async def _run(self, request: Request) -> None:
        params = request.body["sampling_params"]
        if request.asked == 0:
            request.finish = {"type": "length", "length": 0}
        while request.finish is None:
            await asyncio.sleep(0)
            async with self.held:
                self.held.notify_all()
                await self.held.wait_for(lambda: request.finish is not None or not self._stuck(request))
            if request.finish is not None:
                return
            token = next_token(self.weight_version, request.body["input_ids"] + request.ids)
            request.ids.append(token)
            request.versions.append(self.weight_version)
            if token in params["stop_token_ids"]:
                request.finish = {"type": "stop", "matched": token}
            elif any(stop in self.tokenizer.decode(request.ids) for stop in params["stop"]):
                request.finish = {"type": "stop", "matched": "a stop string"}
            elif len(request.ids) >= request.asked:
                request.finish = {"type": "length", "length": request.asked}

    def _stuck(self, request: Request) -> bool:
        return self.paused or (self.hold is not None and len(request.ids) >= self.hold)

    def _reply(self, request: Request) -> dict[str, Any]:
        prompt, ids = request.body["input_ids"], request.ids
        meta: dict[str, Any] = {
            "id": request.body.get("rid"),
            "finish_reason": request.finish,
            "prompt_tokens": len(prompt),
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "weight_version": self.weight_version,
            "output_token_logprobs": [[-0.01 * (id + 1), id, None] for id in ids],
        }
        if request.body.get("logprob_start_len", -1) >= 0:
            meta |= input_logprobs(self.weight_version, request.body)
        if self.spans:
            meta["weight_versions"] = _spans(request.versions)
        if request.body.get("return_routed_experts"):
            rows = np.array([[id, id + 1] for id in [*prompt, *ids][:-1]], dtype="<i4")
            meta["routed_experts"] = base64.b64encode(rows.tobytes()).decode()
        return {"text": "", "output_ids": ids, "meta_info": meta}

    async def _tokenize(self, http: web.Request) -> web.Response:
        if self.tokenizer is None:
            raise web.HTTPNotFound
        body = await http.json()
        ids = self.tokenizer.encode(body["prompt"], add_special_tokens=body["add_special_tokens"])
        return web.json_response({"tokens": ids, "count": len(ids), "max_model_len": 1000})

    # Control ----------------------------------------------------------------------------------------------------------

    async def _server_info(self, _: web.Request) -> web.Response:
        sizes = {"tp_size": 1, "dp_size": 1, "context_length": 1000, "max_total_num_tokens": 5000}
        return web.json_response({"version": self.release, "random_seed": self.seed, **sizes})

    async def _model_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.weight_version})

    async def _openapi(self, _: web.Request) -> web.Response:
        paths = ["/generate", "/v1/loads", *(["/begin_weight_update"] if self.update_session else [])]
        return web.json_response({"paths": {path: {} for path in paths}})

    async def _loads(self, _: web.Request) -> web.Response:
        return web.json_response({"loads": [{"num_running_reqs": len(self.running), "num_waiting_reqs": 0}]})

    async def _control(self, http: web.Request) -> web.Response:
        name = http.match_info["control"]
        self.calls.append(name)
        body = await http.json() if http.body_exists else {}
        if faults := self.control_faults.get(name):
            return web.json_response({"success": False, "message": f"{name} failed"}, status=faults.pop(0))
        if name == "pause_generation":
            self.paused = True
            if body["mode"] == "abort":
                self._abort("")
        elif name == "continue_generation":
            self.paused = False
        elif name == "abort_request":
            self._abort(body["rid"])
        elif name.startswith("update_weights_from"):
            self.weight_version = body.get("weight_version") or self.weight_version
        await self._tell()
        return web.json_response({"success": True, "message": "ok"})

    def _abort(self, prefix: str) -> None:
        for rid, request in self.running.items():
            if rid.startswith(prefix):
                request.finish = {"type": "abort", "message": "Abort", "status_code": None, "err_type": None}


def _spans(versions: list[str]) -> list[dict[str, Any]]:
    spans, at = [], 0
    for version, run in itertools.groupby(versions):
        length = len(list(run))
        spans.append({"version": version, "start": at, "end": at + length})
        at += length
    return spans


def _changed(reply: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    for key, value in changes.items():
        inner = reply["meta_info"] if key.startswith("meta_info.") else reply
        name = key.removeprefix("meta_info.")
        if value is None:
            inner.pop(name, None)
        else:
            inner[name] = value
    return reply
