"""A first message, replies of an endpoint and the calls in them."""

from __future__ import annotations

from typing import Any

from relax_gym.endpoint.replies import Reply, read_reply

HELLO = [{"role": "user", "content": "hello"}]


def reply_of(message: dict[str, Any], finish: str = "stop") -> Reply:
    return read_reply({"choices": [{"message": message, "finish_reason": finish}]})


def call(name: str, arguments: str, id: str | None = "call_1") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
