"""Environments whose actions call tools: typed methods become JSON-schema tools, calls of every family are read."""

from __future__ import annotations

import inspect
import itertools
import json
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, ValidationError, create_model
from pydantic_core import PydanticSerializationError, to_jsonable_python

from relax_gym.env import PARTS, Env, StepResult
from relax_gym.errors import EnvError, suggestion
from relax_gym.tool_calls import Call, MalformedCall, ParsedAction, ToolCall, parse_tool_calls
from relax_gym.types import Message, Tool

__all__ = ["MalformedCall", "ParsedAction", "ToolCall", "ToolEnv", "ToolError", "parse_tool_calls"]

_SAFE_ID = re.compile(r"[\w-]{1,64}\Z", re.ASCII)
_SHOWN = 200  # characters of a malformed call that are shown back to the model


class ToolError(Exception):
    """Raise it in a tool method to tell the model that the call failed; the message becomes the tool's result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ToolMethod:
    schema: Tool
    arguments: type[BaseModel]

    def bind(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Validated and coerced keyword arguments. Raises ToolError saying which is wrong."""
        name = self.schema["function"]["name"]
        try:
            model = self._validate(arguments)
        except ValidationError as error:
            problems = "; ".join(_explain(detail) for detail in error.errors())
            takes = ", ".join(self.schema["function"]["parameters"]["properties"]) or "no arguments"
            raise ToolError(f"wrong arguments for {name}: {problems}. It takes: {takes}") from None
        fields = self.arguments.model_fields
        return {str(fields[key].alias): getattr(model, key) for key in fields if key in model.model_fields_set}

    def _validate(self, arguments: Mapping[str, Any]) -> BaseModel:
        try:
            return self.arguments.model_validate(arguments)
        except ValidationError as error:
            decoded = dict(arguments)
            for detail in error.errors():  # XML calls carry lists, dicts and null as text
                key = detail["loc"][0]
                if isinstance(key, str) and isinstance(arguments.get(key), str):
                    decoded[key] = _json_or_text(arguments[key])
            return self.arguments.model_validate(decoded)


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _explain(detail: Mapping[str, Any]) -> str:
    where = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "missing":
        return f"argument {where!r} is missing"
    if detail["type"] == "extra_forbidden":
        return f"there is no argument {where!r}"
    return f"argument {where!r}: {detail['msg']}, got {detail['input']!r:.80}"


class ToolEnv(Env):
    """An env whose public typed methods with docstrings are tools. Write `reset`, `on_answer` and the tool methods.

    The first paragraph of a method's docstring describes the tool; a Google-style `Args:` section describes its
    arguments. A tool returns a string, a list of content parts, or anything that JSON can hold; it raises `ToolError`
    to report a failure to the model. Any other exception is an error of the env.

    `step` runs every call of an action in order and answers each with one tool message, with reward 0; a call that
    cannot be read, names no tool or has wrong arguments is answered with what was wrong. An action without calls goes
    to `on_answer`. Tools and `on_answer` may be `async def`; if any is, `step` returns an awaitable.

    `info["tool_log"]` of a step with calls holds, for each in order, its `name` (None if it cannot be read), the
    `arguments` that the tool was run with (those given if it was not run), and `error`, None or why it failed. See
    `Trajectory.tool_log`.

    To score calls or end the episode in a tool, keep a note on `self` and override `step`:
    `return super().step(action)._replace(terminated=self.submitted)`.
    """

    _tools_by_name: ClassVar[Mapping[str, _ToolMethod]] = {}
    _tools_async: ClassVar[bool] = False
    _tool_calls_answered: int = 0

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if "_tools_by_name" not in vars(cls):
            methods = _tool_methods(cls)
            cls.tools = [method.schema for method in methods.values()]
            functions = [cls.on_answer, *(getattr(cls, name) for name in methods)]
            cls._tools_async = any(inspect.iscoroutinefunction(function) for function in functions)
            cls._tools_by_name = (
                methods  # last: envs are built in several threads, and this says that the rest is there
            )
        return super().__new__(cls)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        """Begin an episode; call `super().reset(seed=seed)` first."""
        self._tool_calls_answered = 0
        return super().reset(seed=seed, options=options)

    def on_answer(self, text: str) -> StepResult | Awaitable[StepResult]:
        """Take an action that calls no tool; return how the episode goes on."""
        raise EnvError(f"{type(self).__name__} does not implement on_answer(text)")

    def step(self, action: str) -> Any:
        """Run the tool calls in `action`, or pass it to `on_answer`."""
        play = self._tool_step(action)
        return play if self._tools_async else _finish(play, type(self).__name__)

    async def _tool_step(self, action: str) -> StepResult:
        parsed = parse_tool_calls(action)
        if not parsed.calls:
            answer = self.on_answer(parsed.text)
            return await answer if inspect.isawaitable(answer) else answer
        messages, log = [], []
        for call in parsed.calls:
            ran = {"name": call.name, "arguments": getattr(call, "arguments", None), "error": None}
            try:
                content = await self._tool_result(call, ran)
            except ToolError as error:
                ran["error"], content = str(error), f"Error: {error}"
            log.append(ran)
            messages.append(self._tool_message(call, content))
        return StepResult(messages, 0.0, False, False, {"tool_log": log})

    async def _tool_result(self, call: Call, ran: dict[str, Any]) -> str | list[dict[str, Any]]:
        if isinstance(call, MalformedCall):
            quote = f" You wrote: {call.raw[:_SHOWN]}" if call.raw else ""
            raise ToolError(f"this tool call cannot be read: {call.error}.{quote}")
        if call.name not in self._tools_by_name:
            raise ToolError(f"unknown tool {call.name!r:.80}{suggestion(call.name[:80], self._tools_by_name)}")
        arguments = self._tools_by_name[call.name].bind(call.arguments)
        ran["arguments"] = _as_data(arguments, call.name)
        result = getattr(self, call.name)(**arguments)
        if inspect.isawaitable(result):
            result = await result
        return _content(result, f"{type(self).__name__}.{call.name}")

    def _tool_message(self, call: Call, content: str | list[dict[str, Any]]) -> Message:
        self._tool_calls_answered += 1
        # nine letters and digits: the only form that every family's template accepts
        call_id = call.id if call.id and _SAFE_ID.match(call.id) else f"call{self._tool_calls_answered:05d}"
        name = call.name if call.name in self._tools_by_name else "invalid"
        return {"role": "tool", "name": name, "tool_call_id": call_id, "content": content}


def _finish(coroutine: Coroutine[Any, Any, StepResult], env_name: str) -> StepResult:
    """Run a coroutine that has nothing to wait for."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: StepResult = done.value
        return result
    coroutine.close()
    raise EnvError(f"{env_name} waited for something in a method that is no coroutine; write it as async def")


def _as_data(arguments: Mapping[str, Any], tool: str) -> Any:
    """A copy as JSON can hold it, made before the tool may change them. Raises ToolError if it is nested too deep."""
    try:
        return to_jsonable_python(arguments, bytes_mode="base64", serialize_unknown=True)
    except ValueError as error:
        raise ToolError(f"wrong arguments for {tool}: {error}") from None


def _content(result: Any, tool: str) -> str | list[dict[str, Any]]:
    if isinstance(result, list) and result and all(_is_part(part) for part in result):
        return result
    if not isinstance(result, str):
        try:
            result = json.dumps(to_jsonable_python(result), ensure_ascii=False)
        except (PydanticSerializationError, ValueError) as error:
            raise EnvError(f"{tool} returned {result!r:.100}; it must return text, parts or JSON: {error}") from error
    text: str = result
    return text.encode("utf-8", "replace").decode("utf-8")  # JSON may smuggle in lone surrogates no tokenizer takes


def _is_part(value: Any) -> bool:
    return isinstance(value, Mapping) and value.get("type") in PARTS and value["type"] in value


_BASE_NAMES = frozenset([*dir(ToolEnv), "expert_action", "random_action"])


def _tool_methods(cls: type[ToolEnv]) -> dict[str, _ToolMethod]:
    names: dict[str, None] = {}
    for klass in reversed(cls.__mro__):
        if klass not in ToolEnv.__mro__:
            names.update(dict.fromkeys(name for name, value in vars(klass).items() if inspect.isfunction(value)))
    tools = {}
    for name in names:
        function = getattr(cls, name)
        if not name.startswith("_") and name not in _BASE_NAMES and inspect.isfunction(function):
            tools[name] = _tool_method(function, name, f"{cls.__name__}.{name}")
    if not tools:
        raise EnvError(f"{cls.__name__} has no tools; add a public method with typed arguments and a docstring")
    return tools


def _tool_method(function: Callable[..., Any], name: str, where: str) -> _ToolMethod:
    description, argument_docs = _read_docstring(inspect.getdoc(function) or "")
    if not description:
        raise EnvError(f"{where} is a tool without a docstring; say in one what it does, or start its name with _")
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError as error:
        raise EnvError(
            f"{where} has an annotation that cannot be resolved: {error}; import it at module level"
        ) from error
    fields: dict[str, Any] = {}
    for index, parameter in enumerate(list(inspect.signature(function).parameters.values())[1:]):
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise EnvError(f"{where} takes {parameter}; a tool's arguments must be named one by one")
        if parameter.name not in hints:
            raise EnvError(f"{where} has no type for argument {parameter.name!r}; write `{parameter.name}: str` or so")
        default = ... if parameter.default is parameter.empty else parameter.default
        described = Field(default, alias=parameter.name, description=argument_docs.get(parameter.name))
        fields[f"argument_{index}"] = (hints[parameter.name], described)
    try:
        model = create_model(name, __config__=ConfigDict(extra="forbid", coerce_numbers_to_str=True), **fields)
        parameters = _simplified(model.model_json_schema())
    except PydanticUserError as error:
        raise EnvError(f"{where} has an argument type that has no JSON schema: {error.message}") from error
    parameters = {key: parameters[key] for key in ("type", "properties", "required", "$defs") if key in parameters}
    schema = {"name": name, "description": description, "parameters": parameters}
    return _ToolMethod(schema={"type": "function", "function": schema}, arguments=model)


def _simplified(schema: Any) -> Any:
    """Without titles, and `X | None` as a nullable X, which is how chat templates read optional arguments."""
    if isinstance(schema, list):
        return [_simplified(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    out = {key: _simplified(value) for key, value in schema.items() if not (key == "title" and isinstance(value, str))}
    options = out.get("anyOf", [])
    if {"type": "null"} in options and len(options) == 2:
        del out["anyOf"]
        (kept,) = (option for option in options if option != {"type": "null"})
        return {**kept, "nullable": True, **out}
    return out


_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Yields|Raises|Examples?|Notes?):\s*$")
_ARGUMENT = re.compile(r"^(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


def _read_docstring(doc: str) -> tuple[str, dict[str, str]]:
    """(first paragraph, argument descriptions) of a Google-style docstring."""
    paragraph = itertools.takewhile(lambda line: line.strip() and not _SECTION.match(line), doc.splitlines())
    description = " ".join(" ".join(paragraph).split())
    arguments: dict[str, list[str]] = {}
    section, indent, current = "", 0, ""
    for line in doc.splitlines():
        if heading := _SECTION.match(line):
            section, indent = heading.group(1), 0
        elif section in ("Args", "Arguments", "Parameters") and line.strip():
            depth = len(line) - len(line.lstrip())
            indent = indent or depth
            entry = _ARGUMENT.match(line.strip()) if depth == indent else None
            if entry:
                current = entry.group(1)
                arguments[current] = [entry.group(2)]
            elif current:
                arguments[current].append(line.strip())
    return description, {name: " ".join(lines).strip() for name, lines in arguments.items()}
