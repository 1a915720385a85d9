"""Chat messages written the way one template wants them. Pure: nothing here renders or tokenises."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from relax_gym.errors import TemplateError
from relax_gym.types import Message, Tool

_CALL_ID = "call00000"  # Nine letters and digits: the one form that every template with ids accepts.
_MARK = "\ufdd2"  # A noncharacter: no text in interchange has it.
_MEDIA = re.compile(f"{_MARK}(image|video|audio){_MARK}")

_TOOLS = """You can call these functions. Each is given as a JSON schema:
<tools>
{schemas}
</tools>

To call a function, write a JSON object with its name and arguments inside <tool_call></tool_call>:
<tool_call>
{{"name": "function name", "arguments": {{"argument name": "value"}}}}
</tool_call>"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How messages must be written for one template; `media` are the kinds of parts besides text that it may have."""

    content_form: Literal["string", "parts"]
    tool_role: Literal["tool", "user"] = "tool"
    supports_system: bool = False
    supports_tools: bool = False
    supports_tool_role: bool = False
    supports_tool_calls: bool = False
    needs_tool_ids: bool = False
    empty_content: str | None = ""
    json_arguments: bool = False
    media: frozenset[str] = frozenset()

    def replace(self, **changes: Any) -> Dialect:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def content(self, text: str) -> str | list[dict[str, str]]:
        """Text in the form the template wants; where media are marked in it, they become parts."""
        pieces = _MEDIA.split(text)
        if len(pieces) == 1:
            return text if self.content_form == "string" else [{"type": "text", "text": text}]
        parts = [{"type": piece} if at % 2 else {"type": "text", "text": piece} for at, piece in enumerate(pieces)]
        return [part for part in parts if part.get("text") != ""]


def squash(text: str) -> str:
    """Text without white space."""
    return "".join(text.split())


def common_prefix(first: str, second: str) -> str:
    """What two texts begin with."""
    length = next((index for index, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
    return min(first, second, key=len) if length is None else first[:length]


def unseen(messages: Sequence[Message], text: str) -> list[int]:
    """Which system and user messages, in a dialect, have text that is not in `text`, white space aside."""
    seen, missing = squash(text), []
    for index, message in enumerate(messages):
        content = message["content"] if message["role"] in ("system", "user") else ""
        parts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
        if not all(squash(part) in seen for part in parts):
            missing.append(index)
    return missing


def roles(messages: Sequence[Message]) -> str:
    """The roles of messages, for people."""
    return ", ".join(str(message["role"]) for message in messages) or "none"


def content_text(message: Message) -> str:
    """The content of a message as text, media as marks; "" when it has none.

    Lone surrogates, which no tokenizer takes, become "?"; the mark itself becomes U+FFFD.
    """
    content = message.get("content")
    if content is None or isinstance(content, str):
        return _as_text(content or "")
    return "".join(_as_text(p["text"]) if p["type"] == "text" else f"{_MARK}{p['type']}{_MARK}" for p in content)


def check_media(messages: Sequence[Message], readable: frozenset[str]) -> None:
    """Raise TemplateError when messages have media that the model does not read."""
    for message in messages:
        content = message.get("content")
        if content is None or isinstance(content, str):
            continue
        if unreadable := {str(part["type"]) for part in content} - {"text", *readable}:
            raise TemplateError(
                f"a {message['role']} message has {' and '.join(sorted(unreadable))}, but this model reads "
                f"{' and '.join(['text', *sorted(readable)])} only; use a model with a processor for it, or an "
                "environment without"
            )


def _as_text(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8").replace(_MARK, "\N{REPLACEMENT CHARACTER}")


def describe_tools(tools: Sequence[Tool]) -> str:
    """Tool schemas and how to call them, as text for a system message."""
    return _TOOLS.format(schemas="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))


def adapt(messages: Sequence[Message], dialect: Dialect, *, preamble: str = "", name: str) -> list[Message]:
    """Messages, their content as `content_text` gives it, in a template's dialect.

    `preamble` is appended to the system message (made if there is none). System messages in a row become one.

    Raises:
        TemplateError: the template named `name` would drop tool results or tool calls.
    """
    out = list(messages)
    if preamble:
        out = _with_preamble(out, preamble)
    if dialect.tool_role == "user":
        out = _tools_as_user(out)
    out = _join_systems(out)
    if not dialect.supports_system:
        out = _fold_system(out)
    return [_in_dialect(message, dialect, name) for message in out]


def _with_preamble(messages: list[Message], preamble: str) -> list[Message]:
    if messages and messages[0]["role"] == "system":
        first = messages[0]
        return [{**first, "content": _join(first["content"], preamble)}, *messages[1:]]
    return [{"role": "system", "content": preamble}, *messages]


def _join_systems(messages: list[Message]) -> list[Message]:
    """System messages in a row as one, as some templates show only one of them."""
    out: list[Message] = []
    for message in messages:
        if out and out[-1]["role"] == message["role"] == "system":
            previous = out.pop()
            message = {**previous, "content": _join(previous["content"], message["content"])}
        out.append(message)
    return out


def _tools_as_user(messages: list[Message]) -> list[Message]:
    """Tool results as user messages; what stands next to one joins it, as most templates want roles to alternate."""
    out: list[Message] = []
    after_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result:
            title = f"Result of {message['name']}:" if message.get("name") else "Tool result:"
            message = {"role": "user", "content": f"{title}\n{message['content']}"}
        if out and out[-1]["role"] == message["role"] == "user" and (is_result or after_result):
            previous = out.pop()
            message = {**previous, "content": _join(previous["content"], message["content"])}
        out.append(message)
        after_result = is_result
    return out


def _fold_system(messages: list[Message]) -> list[Message]:
    """System text in front of the next user message, for templates without a system role."""
    out: list[Message] = []
    pending = ""
    for message in messages:
        if message["role"] == "system":
            pending = _join(pending, message["content"])
        elif pending and message["role"] == "user":
            out.append({**message, "content": _join(pending, message["content"])})
            pending = ""
        else:
            out.append(message)
    return [*out, {"role": "user", "content": pending}] if pending else out


def _in_dialect(message: Message, dialect: Dialect, name: str) -> Message:
    if message["role"] == "tool":
        if not dialect.supports_tool_role:
            raise TemplateError(dropped("messages of role 'tool'", name))
        if dialect.needs_tool_ids:
            message = {"tool_call_id": _CALL_ID, "name": "tool", **message}
    if calls := message.get("tool_calls"):
        message = _with_calls(message, [_call(call) for call in calls], dialect, name)
    content = message["content"]
    return message if content is None else {**message, "content": dialect.content(content)}


def _with_calls(message: Message, calls: list[dict[str, Any]], dialect: Dialect, name: str) -> Message:
    if dialect.supports_tool_calls:
        if dialect.json_arguments:
            calls = [_with_arguments(call, json.dumps(call["function"]["arguments"])) for call in calls]
        return {**message, "content": message["content"] or dialect.empty_content, "tool_calls": calls}
    if dialect.tool_role == "tool":
        raise TemplateError(dropped("the tool_calls of assistant messages", name))
    written = [f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>" for call in calls]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join([message["content"], *written] if message["content"] else written)}


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call in the Hugging Face form: arguments as a mapping, though many write them as a JSON string."""
    function = dict(call.get("function", call))
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except json.JSONDecodeError as error:
            raise TemplateError(
                f"a tool call has arguments {arguments!r:.100}; they must be a mapping or its JSON text: {error}"
            ) from error
    function = {"name": function.get("name"), "arguments": arguments}
    return {"id": call.get("id", _CALL_ID), "type": "function", "function": function}


def _with_arguments(call: dict[str, Any], arguments: Any) -> dict[str, Any]:
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _join(first: str, second: str) -> str:
    return f"{first}\n\n{second}" if first and second else first or second


def dropped(what: str, name: str) -> str:
    """The message of the error for something a template does not show."""
    return (
        f'the chat template of {name} does not show {what}; set chat.tool_role = "user" to have tools, calls and '
        "results written as plain messages, or give another template in chat.template"
    )


def hidden(messages: Sequence[Message], role: str, name: str) -> str:
    """The message of the error for one of these messages that a template does not show."""
    return (
        f"the chat template of {name} drops a {role} message (roles: {roles(messages)}); change what the environment "
        "returns to what the template shows, or give another template in chat.template"
    )
