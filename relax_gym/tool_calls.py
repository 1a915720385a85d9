"""Finds tool calls in what a model wrote. Every format is recognised by its own markers; nothing is ever evaluated.

The time taken grows linearly with the text, whatever the model writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that could be read. Whether the tool exists and takes these arguments is not known yet."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MalformedCall:
    """Something that was meant as a call: its text, what is wrong with it, and the name if it can be told."""

    raw: str
    error: str
    name: str | None = None
    id: str | None = None


Call = ToolCall | MalformedCall

MAX_CALLS = 64
"""Calls read from one action; what follows them is reported as one malformed call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedAction:
    """The calls in the order they were written, and the text around them (without calls: the whole action)."""

    calls: tuple[Call, ...]
    text: str


def parse_tool_calls(text: str) -> ParsedAction:
    """Split what a model wrote into calls and text.

    Understood: `<tool_call>` with JSON (Hermes, Qwen) or with `<function=…>` (Qwen3-Coder), a bare `<function=…>`,
    `[TOOL_CALLS]` (Mistral, both forms), `<|python_tag|>` and an action that is nothing but JSON calls (Llama 3), and
    DeepSeek's tool-call tokens. Thinking is never searched for calls.
    """
    calls: list[Call] = []
    position = answer_start = _end_of_opened_thinking(text)
    kept = [text[:position]]
    while (marker := _MARKER.search(text, position)) and len(calls) <= MAX_CALLS:
        kept.append(text[position : marker.start()])
        if marker.group() == "<think>":
            position = answer_start = _after(text, "</think>", marker.end())
            kept.append(text[marker.start() : position])
            continue
        found, position = _READERS[marker.group()](text, marker.end())
        calls += found
    kept.append(text[position:])
    if not calls:
        calls = _bare_json(text[answer_start:])
        kept = [text[:answer_start]] if calls else [text]
    if len(calls) > MAX_CALLS:
        calls = [*calls[:MAX_CALLS], MalformedCall(raw="", error=f"more than {MAX_CALLS} calls; the rest are ignored")]
    return ParsedAction(calls=tuple(calls), text="".join(kept).strip() if calls else text)


def _end_of_opened_thinking(text: str) -> int:
    """Where thinking that the prompt already opened ends; 0 when there is none."""
    end = text.find("</think>")
    return 0 if end < 0 or "<think>" in text[:end] else end + len("</think>")


def _after(text: str, tag: str, start: int) -> int:
    end = text.find(tag, start)
    return len(text) if end < 0 else end + len(tag)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, strict=False)
_SPACE = re.compile(r"\s*")
_BETWEEN = re.compile(r"[\s,;]*")


def _decode(text: str, start: int) -> tuple[Any, int, str | None]:
    """The JSON value at `start`: (value, end, error)."""
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        return None, start, f"invalid JSON at character {error.pos - start}: {error.msg}"
    except ValueError as error:
        return None, start, f"invalid JSON: {error}"
    except RecursionError:
        return None, start, "invalid JSON: nested too deeply"
    return value, end, None


def _objects(text: str, start: int) -> tuple[list[Call], int, str | None]:
    """One or more JSON objects, in brackets or not: (the calls before the first error, end, error)."""
    position = _skip(_SPACE, text, start)
    in_brackets = text.startswith("[", position)
    if in_brackets:
        position = _skip(_SPACE, text, position + 1)
    calls: list[Call] = []
    while text.startswith("{", position):
        value, end, error = _decode(text, position)
        if error:
            return calls, position, error
        calls.append(_to_call(value, text[position:end]))
        position, separator = end, _skip(_BETWEEN, text, end)
        if text.startswith("{", separator) or in_brackets:
            position = separator
    if in_brackets and text.startswith("]", position):
        position += 1
    return calls, position, None if calls else "expected a JSON object with 'name' and 'arguments'"


def _skip(pattern: re.Pattern[str], text: str, start: int) -> int:
    match = pattern.match(text, start)
    return match.end() if match else start


def _to_call(value: dict[str, Any], raw: str) -> Call:
    """A decoded JSON object as a call."""
    inner = value.get("function")
    fields = {**value, **inner} if isinstance(inner, dict) else value
    name = fields.get("name")
    if not isinstance(name, str) or not name:
        return MalformedCall(raw=raw, error='the call has no \'name\'; write {"name": ..., "arguments": {...}}')
    id = fields.get("id") if isinstance(fields.get("id"), str) else None
    return _named_call(name, fields.get("arguments", fields.get("parameters")), raw, id)


def _named_call(name: str, arguments: Any, raw: str, id: str | None = None) -> Call:
    error = None
    if isinstance(arguments, str) and arguments.strip():
        source = arguments.strip()
        arguments, end, error = _decode(source, 0)
        if error is None and end != len(source):
            error = f"unexpected text after the JSON object: {source[end:]!r:.50}"
    if error:
        return MalformedCall(raw=raw, error=f"the arguments are {error}", name=name, id=id)
    if arguments in (None, ""):
        arguments = {}
    if not isinstance(arguments, dict):
        return MalformedCall(raw=raw, error="the arguments must be a JSON object", name=name, id=id)
    return ToolCall(name=name, arguments=arguments, id=id)


Reader = Callable[[str, int], tuple[list[Call], int]]
"""Reads what follows a marker: (text, end of the marker) → (calls, where the rest of the text begins)."""

_TOOL_CALL_TAG = re.compile(r"</?tool_call>")


def _read_tool_call(text: str, start: int) -> tuple[list[Call], int]:
    body = _skip(_SPACE, text, start)
    if text.startswith("<function=", body):
        calls, end = _read_function(text, body + len("<function="))
        return calls, _skip(_CLOSING_TOOL_CALL, text, end)
    calls, end, error = _objects(text, body)
    tag = _TOOL_CALL_TAG.search(text, end)
    closed = tag is not None and tag.group() == "</tool_call>"
    stop = tag.start() if tag else len(text)
    rest = text[end:stop].strip()
    if error is None and rest and closed:
        error, calls = f"unexpected text after the JSON object: {rest!r:.50}", calls[:-1]
    if error:
        calls.append(MalformedCall(raw=text[body:stop].strip(), error=error))
    elif rest:
        stop = end
    return calls, tag.end() if tag and closed else stop


_CLOSING_TOOL_CALL = re.compile(r"\s*</tool_call>")
_FUNCTION_NAME = re.compile(r"\s*([^\s<>]+)\s*>")
_FUNCTION_END = re.compile(r"</function>|(?=</?tool_call>)|(?=<function=)")
_PARAMETER = re.compile(r"<parameter=\s*([^\s<>]+)\s*>")
_PARAMETER_END = re.compile(r"</parameter>|(?=<parameter=)|\Z")


def _read_function(text: str, start: int) -> tuple[list[Call], int]:
    end = _FUNCTION_END.search(text, start)
    stop, after = (end.start(), end.end()) if end else (len(text), len(text))
    raw = "<function=" + text[start:stop].strip()
    name = _FUNCTION_NAME.match(text, start, stop)
    if name is None:
        return [MalformedCall(raw=raw, error="expected <function=NAME>")], after
    body = text[name.end() : stop].strip()
    if body.startswith("{"):
        return [_named_call(name.group(1), body, raw)], after
    try:
        arguments = dict(_parameters(text[name.end() : stop]))
    except ValueError as error:
        return [MalformedCall(raw=raw, error=str(error), name=name.group(1))], after
    return [ToolCall(name=name.group(1), arguments=arguments)], after


def _parameters(body: str) -> Iterator[tuple[str, str]]:
    position = 0
    while (position := _skip(_SPACE, body, position)) < len(body):
        opening = _PARAMETER.match(body, position)
        if opening is None:
            raise ValueError(f"expected <parameter=NAME>value</parameter>, got {body[position : position + 40]!r}")
        closing = _PARAMETER_END.search(body, opening.end())
        assert closing is not None, "the pattern matches the end of the text"
        yield opening.group(1), body[opening.end() : closing.start()].removeprefix("\n").removesuffix("\n")
        position = closing.end()


_MISTRAL_NAME = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*([\w-]+)\s*)?\[ARGS\]\s*")


def _read_mistral(text: str, start: int) -> tuple[list[Call], int]:
    stop = text.find("[TOOL_CALLS]", start)
    stop = len(text) if stop < 0 else stop
    named = _MISTRAL_NAME.match(text, start)
    if named is None:
        return _read_objects(text, start, stop)
    value, end, error = _decode(text, named.end())
    if error:
        raw = text[start:stop].strip()
        return [MalformedCall(raw=raw, error=error, name=named.group(1), id=named.group(2))], stop
    return [_named_call(named.group(1), value, text[start:end].strip(), named.group(2))], end


def _read_objects(text: str, start: int, stop: int | None = None) -> tuple[list[Call], int]:
    calls, end, error = _objects(text, start)
    if error is None:
        return calls, end
    stop = len(text) if stop is None else max(stop, end)
    return [*calls, MalformedCall(raw=text[end:stop].strip(), error=error)], stop


_DEEPSEEK_BEGIN, _DEEPSEEK_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK_STOP = re.compile(rf"{_DEEPSEEK_END}|(?={_DEEPSEEK_BEGIN})|(?=<｜tool▁calls▁end｜>)")
_DEEPSEEK_HEAD = re.compile(r"(?:function<｜tool▁sep｜>([^\n<]+)\n\s*```(?:json)?|([^\n<]+)<｜tool▁sep｜>)\s*")
_DEEPSEEK_TAIL = re.compile(rf"\s*(?:```)?\s*(?:{_DEEPSEEK_END})?")


def _read_deepseek(text: str, start: int) -> tuple[list[Call], int]:
    end = _DEEPSEEK_STOP.search(text, start)
    stop, after = (end.start(), end.end()) if end else (len(text), len(text))
    head = _DEEPSEEK_HEAD.match(text, start, stop)
    if head is None:
        return [MalformedCall(raw=text[start:stop].strip(), error="expected NAME<｜tool▁sep｜>{arguments}")], after
    name = (head.group(1) or head.group(2)).strip()
    value, json_end, error = _decode(text, head.end())
    if error:
        return [MalformedCall(raw=text[start:stop].strip(), error=error, name=name)], after
    return [_named_call(name, value, text[start:json_end])], _skip(_DEEPSEEK_TAIL, text, json_end)


def _skip_marker(text: str, start: int) -> tuple[list[Call], int]:
    return [], start


_READERS: dict[str, Reader] = {
    "<tool_call>": _read_tool_call,
    "<function=": _read_function,
    "[TOOL_CALLS]": _read_mistral,
    "<|python_tag|>": _read_objects,
    _DEEPSEEK_BEGIN: _read_deepseek,
    "<｜tool▁calls▁begin｜>": _skip_marker,
    "<｜tool▁calls▁end｜>": _skip_marker,
}
_MARKER = re.compile("|".join(map(re.escape, ["<think>", *_READERS])))
_LOOKS_LIKE_CALL = re.compile(r'\[?\s*\{\s*"(?:name|type|function)"\s*:')


def _bare_json(text: str) -> list[Call]:
    """Calls of an action that is nothing but JSON calls; none when it is anything else, JSON answers included."""
    text = text.strip().removesuffix("<|eom_id|>").removesuffix("<|eot_id|>").strip()
    if not _LOOKS_LIKE_CALL.match(text) or not ('"parameters"' in text or '"arguments"' in text):
        return []
    calls, end, error = _objects(text, 0)
    if error:
        return [*calls, MalformedCall(raw=text[end:], error=error)]
    return calls if end == len(text) and any(call.name for call in calls) else []
