"""What /chat/completions answers → the text that an env's `step` takes. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from relax_gym.chat import without_thinking
from relax_gym.types import FinishReason


class ReplyError(ValueError):
    """A reply is not what the API says it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One tool call. `arguments` is JSON text as the model wrote it, which need not be valid."""

    id: str
    name: str
    arguments: str

    @property
    def as_text(self) -> str:
        """The call in the form that `relax_gym.parse_tool_calls` reads."""
        try:
            arguments = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = self.arguments  # the env tells the model what is wrong with it
        call = {"name": self.name, "arguments": arguments, "id": self.id}
        return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"

    @property
    def as_json(self) -> dict[str, Any]:
        """The call as it goes back to the endpoint."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens that the server counted."""

    prompt: int = 0
    completion: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(prompt=self.prompt + other.prompt, completion=self.completion + other.completion)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One answer: its text and its thinking apart, and its tool calls."""

    content: str
    reasoning: str
    calls: tuple[Call, ...]
    finish_reason: FinishReason
    usage: Usage

    @property
    def action(self) -> str:
        """What the env gets: no thinking, and tool calls as text."""
        return "\n".join(filter(None, [self.content, *(call.as_text for call in self.calls)]))

    @property
    def text(self) -> str:
        """All that the model said, for people and for rewards that read thinking."""
        return f"<think>{self.reasoning}</think>\n{self.action}" if self.reasoning else self.action


def read_reply(reply: Any) -> Reply:
    """Raise ReplyError unless it is one, whole answer."""
    choice = _first_choice(reply)
    message = choice.get("message")
    if not isinstance(message, Mapping):
        raise ReplyError(f"the reply's choice has no message: {choice!r:.200}")
    finish = choice.get("finish_reason")
    if finish in ("abort", "error"):
        raise ReplyError(f"the server gave the answer up (finish_reason {finish!r})")
    content = _text(message.get("content"))
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    spoken = without_thinking(content, opened=False)
    if not reasoning and spoken != content:
        reasoning = content.removesuffix(spoken).strip().removeprefix("<think>").removesuffix("</think>").strip()
    return Reply(
        content=spoken,
        reasoning=reasoning if isinstance(reasoning, str) else "",
        calls=_calls(message.get("tool_calls")),
        finish_reason=FinishReason.LENGTH if finish == "length" else FinishReason.STOP,
        usage=_usage(reply.get("usage")),
    )


def _first_choice(reply: Any) -> Mapping[str, Any]:
    if not isinstance(reply, Mapping):
        raise ReplyError(f"the reply is no object: {reply!r:.200}")
    choices = reply.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
        raise ReplyError(f"the reply has no choices: {json.dumps(reply)[:200]}")
    return choices[0]


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    raise ReplyError(f"the reply's message has content {content!r:.200}; it must be text")


def _calls(calls: Any) -> tuple[Call, ...]:
    if calls is not None and not isinstance(calls, list):
        raise ReplyError(f"the reply has tool_calls {calls!r:.200}; they must be a list")
    return tuple(_call(call, number) for number, call in enumerate(calls or (), start=1))


def _call(call: Any, number: int) -> Call:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ReplyError(f"the reply has tool call {call!r:.200}, without the name of a function")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments or {})
    given = call.get("id")
    return Call(
        id=given if isinstance(given, str) and given else f"call{number:05d}",
        name=function["name"],
        arguments=arguments,
    )


def _usage(usage: Any) -> Usage:
    def count(key: str) -> int:
        value = usage.get(key) if isinstance(usage, Mapping) else None
        return value if isinstance(value, int) else 0

    return Usage(prompt=count("prompt_tokens"), completion=count("completion_tokens"))
