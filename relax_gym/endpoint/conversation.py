"""One episode as messages of the OpenAI API. Pure, but for the encoding of media."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from relax_gym.endpoint.replies import Call, Reply
from relax_gym.media.files import MIME, encode, suffix
from relax_gym.media.items import Audio, Media, Video
from relax_gym.tool_calls import MalformedCall, ToolCall, parse_tool_calls
from relax_gym.types import Message


class Conversation:
    """The messages so far. `observe` and `answer` alternate, `observe` first.

    APIs insist that a message of role `tool` answers a call of the assistant message before it, and that every call is
    answered. Whatever an env makes of a model's calls, the messages are written so that this holds: calls that were
    answered one for one become `tool_calls` with the ids of their results, even those that the model wrote as text;
    otherwise calls and results become text.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._reply: Reply | None = None

    def observe(self, observation: Sequence[Message]) -> None:
        """Append what the env said: messages whose media are loaded."""
        reply, self._reply = self._reply, None
        if reply is not None:
            assistant, observation = _linked(reply, observation)
            self.messages.append(assistant)
        for _, alike in groupby(observation, key=lambda message: message["role"] == "tool"):
            written = [as_openai(message) for message in alike]
            self.messages += [message for message, _ in written]
            self.messages += [media for _, media in written if media is not None]  # results of one answer stay together

    def answer(self, reply: Reply) -> None:
        """Remember what the model said; it is written when the env's answer to it is known."""
        self._reply = reply


def as_openai(message: Message) -> tuple[Message, Message | None]:
    """A message of an env in the form of the API, and a message of the user with the media of a tool's result.

    Most servers take media from users only.
    """
    out = {key: message[key] for key in ("role", "name", "tool_call_id") if message.get(key) is not None}
    content = message.get("content")
    parts = [] if content is None or isinstance(content, str) else [_part(part) for part in content]
    if calls := message.get("tool_calls"):
        out["tool_calls"] = [_call(call, number).as_json for number, call in enumerate(calls, start=1)]
    if message["role"] != "tool" or not parts:
        return {**out, "content": parts or content}, None
    text = [part for part in parts if part["type"] == "text"]
    media = [part for part in parts if part["type"] != "text"]
    result = {**out, "content": "\n".join(part["text"] for part in text) or "See the message of the user below."}
    return result, {"role": "user", "content": media} if media else None


def _linked(reply: Reply, observation: Sequence[Message]) -> tuple[Message, list[Message]]:
    """The assistant's message, and the observation that answers it, tool results first."""
    results = [message for message in observation if message["role"] == "tool"]
    others = [message for message in observation if message["role"] != "tool"]
    content, calls = (reply.content, list(reply.calls)) if reply.calls else _calls_in(reply.action)
    if not results or len(results) != len(calls):
        return {"role": "assistant", "content": reply.action}, [*map(_as_user, results), *others]
    ids = [call.id for call in calls]
    if len(set(ids)) != len(ids):
        calls = [Call(id=f"call{n:05d}", name=c.name, arguments=c.arguments) for n, c in enumerate(calls, start=1)]
    linked = [{**result, "tool_call_id": call.id} for result, call in zip(results, calls, strict=True)]
    assistant = {"role": "assistant", "content": content or None, "tool_calls": [call.as_json for call in calls]}
    return assistant, [*linked, *others]


def _calls_in(action: str) -> tuple[str, list[Call]]:
    """Text and calls of an answer in which the model wrote its calls as text."""
    parsed = parse_tool_calls(action)
    return parsed.text, [_written(call, number) for number, call in enumerate(parsed.calls, start=1)]


def _written(call: ToolCall | MalformedCall, number: int) -> Call:
    arguments = call.arguments if isinstance(call, ToolCall) else {"unreadable": call.raw}
    return Call(
        id=call.id or f"call{number:05d}",
        name=call.name or "invalid",
        arguments=json.dumps(arguments, ensure_ascii=False),
    )


def _as_user(result: Message) -> Message:
    """A tool's result as a message of the user, for answers that have no calls to link it with."""
    title = f"Result of {result['name']}:\n" if result.get("name") else "Tool result:\n"
    content = result.get("content") or ""
    if isinstance(content, str):
        return {"role": "user", "content": title + content}
    return {"role": "user", "content": [{"type": "text", "text": title}, *content]}


def _call(call: Mapping[str, Any], number: int) -> Call:
    """A call in an env's own assistant message: its arguments may be a mapping."""
    function = call.get("function", call)
    arguments = function.get("arguments") or {}
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return Call(id=call.get("id") or f"call{number:05d}", name=function["name"], arguments=arguments)


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    if part["type"] == "text":
        return {"type": "text", "text": part["text"]}
    item: Media = part[part["type"]]
    data = base64.b64encode(encode(item)).decode()
    if isinstance(item, Audio):
        return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    kind = "video_url" if isinstance(item, Video) else "image_url"
    return {"type": kind, kind: {"url": f"data:{MIME[suffix(item)]};base64,{data}"}}
