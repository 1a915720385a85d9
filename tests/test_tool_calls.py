"""Tool calls in every family's format, and what goes wrong in them."""

from __future__ import annotations

import time

import pytest

from relax_gym.tools import MalformedCall, ParsedAction, ToolCall, parse_tool_calls

ADD = ToolCall(name="add", arguments={"a": 1, "b": 2})
DEEPSEEK_R1 = (
    "Sure.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    '{"a": 1, "b": 2}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
DEEPSEEK_V31 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>"
    '{"a": 1, "b": 2}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
QWEN_CODER = (
    "I add.\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n"
    "</function>\n</tool_call>"
)
ADD_TEXT = ToolCall(name="add", arguments={"a": "1", "b": "2"})


@pytest.mark.parametrize(
    ("text", "calls", "rest"),
    [
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>', (ADD,), ""),
        ('Hm. <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}', (ADD,), "Hm."),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}</tool_call> ok', (ADD,), "ok"),
        (
            '<tool_call>{"name": "say", "arguments": {"x": "</tool_call>{"}}</tool_call>',
            (ToolCall(name="say", arguments={"x": "</tool_call>{"}),),
            "",
        ),
        (
            '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}\n{"name": "now"}</tool_call>',
            (ADD, ToolCall(name="now")),
            "",
        ),
        (
            '<tool_call>{"name": "now", "arguments": null}</tool_call>\n'
            '<tool_call>{"name": "now", "arguments": ""}</tool_call>',
            (ToolCall(name="now"), ToolCall(name="now")),
            "",
        ),
        (
            '<tool_call>{"type": "function", "id": "x1", "function": {"name": "now", "arguments": {}}}</tool_call>',
            (ToolCall(name="now", id="x1"),),
            "",
        ),
        (QWEN_CODER, (ADD_TEXT,), "I add."),
        (QWEN_CODER.replace("<tool_call>", "").replace("</tool_call>", ""), (ADD_TEXT,), "I add."),
        (
            "<tool_call><function=run><parameter=code>\nif a:\n\n  b < c\n\n</parameter></function></tool_call>",
            (ToolCall(name="run", arguments={"code": "if a:\n\n  b < c\n"}),),
            "",
        ),
        ('<function=add>{"a": 1, "b": 2}</function>', (ADD,), ""),
        (
            '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}, {"name": "now"}]',
            (ADD, ToolCall(name="now")),
            "",
        ),
        ('Go[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}[TOOL_CALLS]now[ARGS]{}', (ADD, ToolCall(name="now")), "Go"),
        ("[TOOL_CALLS]now[CALL_ID]abc123456[ARGS]{}", (ToolCall(name="now", id="abc123456"),), ""),
        ('{"name": "add", "parameters": {"a": 1, "b": 2}}', (ADD,), ""),
        ('<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}', (ADD,), ""),
        (
            '{"type": "function", "name": "add", "parameters": {"a": 1, "b": 2}}; '
            '{"name": "now", "parameters": {}}<|eom_id|>',
            (ADD, ToolCall(name="now")),
            "",
        ),
        (DEEPSEEK_R1, (ADD, ToolCall(name="now")), "Sure."),
        (DEEPSEEK_V31, (ADD,), ""),
        (
            '<think><tool_call>{"name": "now"}</tool_call></think>Yes '
            '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>',
            (ADD,),
            '<think><tool_call>{"name": "now"}</tool_call></think>Yes',
        ),
        (
            'plan: <tool_call>{"name": "now"}</think>\n{"name": "add", "parameters": {"a": 1, "b": 2}}',
            (ADD,),
            'plan: <tool_call>{"name": "now"}</think>',
        ),
    ],
)
def test_every_family_format_is_read(text: str, calls: tuple[ToolCall, ...], rest: str) -> None:
    assert parse_tool_calls(text) == ParsedAction(calls=calls, text=rest)


@pytest.mark.parametrize(
    "text",
    [
        "The answer is 3.",
        '{"answer": 3}',
        '{"name": "Bob", "age": 3}',
        '{"name": "add", "parameters": {}} is how you call it',
        '<think>I call <tool_call>{"name": "now"}</tool_call>',
        "a < b and <tool> [TOOL] {",
        "",
        "   ",
    ],
)
def test_text_that_is_no_call_stays_as_it_is(text: str) -> None:
    assert parse_tool_calls(text) == ParsedAction(calls=(), text=text)


@pytest.mark.parametrize(
    ("text", "error", "name"),
    [
        ("<tool_call>add(1, 2)</tool_call>", "expected a JSON object with 'name' and 'arguments'", None),
        ('<tool_call>{"name": "add", "arguments": {"a": 1,}}</tool_call>', "invalid JSON at character 3", None),
        ("<tool_call>{'name': 'add'}</tool_call>", "invalid JSON at character 1: Expecting property name", None),
        ('<tool_call>{"name": "add"}}</tool_call>', "unexpected text after the JSON object: '}'", None),
        ('<tool_call>{"arguments": {}}</tool_call>', "the call has no 'name'", None),
        ('<tool_call>{"name": 3}</tool_call>', "the call has no 'name'", None),
        ('<tool_call>{"name": "add", "arguments": [1, 2]}</tool_call>', "the arguments must be a JSON object", "add"),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\""}</tool_call>', "the arguments are invalid JSON", "add"),
        ('<tool_call>{"name": "add", "arguments": "{} x"}</tool_call>', "unexpected text after the JSON", "add"),
        ('<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "invalid JSON: NaN is not JSON", None),
        ('<tool_call>{"name": "add", "arguments": {"a": ' + "1" * 5000 + "}}", "invalid JSON: Exceeds the limit", None),
        ('<tool_call>{"name": ' + "[" * 100_000, "invalid JSON: nested too deeply", None),
        ("<tool_call><function=></function></tool_call>", "expected <function=NAME>", None),
        ("<tool_call><function=add>1, 2</function>", "expected <parameter=NAME>value</parameter>, got '1, 2'", "add"),
        ("[TOOL_CALLS]", "expected a JSON object", None),
        ("[TOOL_CALLS][]", "expected a JSON object", None),
        ("[TOOL_CALLS]add[ARGS]{1}", "invalid JSON at character 1", "add"),
        ("<|python_tag|>add.call(a=1)", "expected a JSON object", None),
        ('{"name": "add", "parameters": {"a": 1', "invalid JSON at character 37", None),
        ("<｜tool▁call▁begin｜>add{}<｜tool▁call▁end｜>", "expected NAME<｜tool▁sep｜>{arguments}", None),
        ("<｜tool▁call▁begin｜>add<｜tool▁sep｜>{a}<｜tool▁call▁end｜>", "invalid JSON at character 1", "add"),
    ],
)
def test_k79_a_malformed_call_says_what_is_wrong(text: str, error: str, name: str | None) -> None:
    (call,) = parse_tool_calls(text).calls
    assert isinstance(call, MalformedCall)
    assert error in call.error
    assert call.name == name


def test_k79_good_calls_beside_a_malformed_one_are_kept_in_order() -> None:
    good = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
    parsed = parse_tool_calls(
        f"a<tool_call>{good}</tool_call>b<tool_call>{{oops</tool_call>c<tool_call>{good}</tool_call>d"
    )
    assert [type(call).__name__ for call in parsed.calls] == ["ToolCall", "MalformedCall", "ToolCall"]
    assert parsed.text == "abcd"
    listed = parse_tool_calls(f"[TOOL_CALLS][{good}, {good}, {{oops}}]").calls
    assert listed[:2] == (ADD, ADD)
    assert listed[2] == MalformedCall(
        raw="{oops}]", error="invalid JSON at character 1: Expecting property name enclosed in double quotes"
    )


@pytest.mark.parametrize(
    "unit",
    [
        "<tool_call>", '<tool_call>{"a":"', '<tool_call>{"name":"a"}', "<tool_call><function=a>", "<function=",
        "<function=a><parameter=b>", "[TOOL_CALLS]", '[TOOL_CALLS][{"', "[TOOL_CALLS]a ", '[TOOL_CALLS]a[ARGS]"',
        "<｜tool▁call▁begin｜>", "<think>", "</think>", "<|python_tag|>", " ", "[", '{"name":"arguments"', "\n<",
    ],
)  # fmt: skip
def test_a_megabyte_of_anything_is_read_in_linear_time(unit: str) -> None:
    start = time.process_time()
    parsed = parse_tool_calls(unit * (1_000_000 // len(unit)))
    assert len(parsed.calls) <= 65
    assert time.process_time() - start < 2.0  # measured: 0.15 s at most; the quadratic ways take 10 s and more


def test_calls_beyond_the_limit_are_one_malformed_call() -> None:
    calls = parse_tool_calls('<tool_call>{"name": "now"}</tool_call>' * 70).calls
    assert calls[:64] == (ToolCall(name="now"),) * 64
    assert calls[64:] == (MalformedCall(raw="", error="more than 64 calls; the rest are ignored"),)
