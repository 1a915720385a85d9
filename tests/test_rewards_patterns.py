"""Rewards of form: GSM8K's mark, regular expressions and JSON schemas."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest
from reward_kit import episode

from relax_gym.errors import RewardError
from relax_gym.testing import check_reward
from relax_gym_rewards.gsm8k import GSM8K
from relax_gym_rewards.json_schema import JsonSchema
from relax_gym_rewards.regex import Regex

HUGE = 200_000

# --- GSM8K -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "answer", "expected", "strict"),
    [
        ("2+3=5\n#### 5", "work: 2+3\n#### 5", 1.0, 1.0),
        ("#### 5", 5, 1.0, 1.0),
        ("####5", "5", 1.0, 1.0),
        ("#### 1,234", "#### 1234", 1.0, 1.0),
        ("#### 1234", "#### 1,234", 1.0, 1.0),
        ("#### $5", 5, 1.0, 1.0),
        ("#### 5.0", 5, 1.0, 1.0),
        ("#### 5 apples", 5, 1.0, 1.0),
        ("#### 25%", "#### 25", 1.0, 1.0),
        ("#### 7\\%", 7, 1.0, 1.0),
        ("The answer is 25%", 25, 1.0, 0.0),
        ("#### 25%", 0.25, 1.0, 1.0),
        ("#### 25%", "25%", 1.0, 1.0),
        ("#### 2500%", "25%", 0.0, 0.0),
        ("#### 25%", 2500, 0.0, 0.0),
        ("#### -5", -5, 1.0, 1.0),
        ("#### 5", -5, 0.0, 0.0),
        ("#### 4\nno\n#### 5", 5, 1.0, 1.0),
        ("#### 5\nno\n#### 4", 5, 0.0, 0.0),
        ("The answer is 5.", 5, 1.0, 0.0),
        ("5 is not it, 6 is", 5, 0.0, 0.0),
        ("#### 4 or 5", 5, 0.0, 0.0),
        ("#### \n5", 5, 0.0, 0.0),
        ("5 ####", 5, 0.0, 0.0),
        ("<think>#### 5</think>", 5, 0.0, 0.0),
        ("<think>#### 4</think>#### 5", 5, 1.0, 1.0),
        ("<think>#### 5", 5, 0.0, 0.0),
        ("#### ５", 5, 0.0, 0.0),
        ("five", 5, 0.0, 0.0),
        ("", 5, 0.0, 0.0),
        ("#### 50", 5, 0.0, 0.0),
        ("#### 123456789", 123456780, 0.0, 0.0),
        ("#### " + "9" * HUGE, 5, 0.0, 0.0),
        ("#" * HUGE + " 5", 5, 1.0, 1.0),
    ],
)
def test_gsm8k(action: str, answer: Any, expected: float, strict: float) -> None:
    finished = episode("something else", action, answer=answer)
    assert (GSM8K()(finished), GSM8K(strict=True)(finished)) == (expected, strict)


@pytest.mark.parametrize("answer", ["many", "", "#### many\n5", True, [[5]], {"a": 5}], ids=repr)
def test_gsm8k_refuses_a_reference_without_a_number(answer: Any) -> None:
    with pytest.raises(
        RewardError, match=r"gsm8k: info\['answer'\] is .*; it must be a (number or '… #### number'|text)"
    ):
        GSM8K()(episode("5", answer=answer))


# --- regular expressions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "options", "action", "answer", "expected"),
    [
        (r"\d+", {}, "there are 42", None, 1.0),
        (r"\d+", {}, "there are none", None, 0.0),
        (r"\d+", {}, "٤٢", None, 0.0),
        (r"\d+", {}, "", None, 0.0),
        (r"", {}, "", None, 1.0),
        (r"\d+", {"match": "full"}, "42", None, 1.0),
        (r"\d+", {"match": "full"}, " 42\n", None, 1.0),
        (r"\d+", {"match": "full"}, "42 or so", None, 0.0),
        (r"\d+|\d+ or so", {"match": "full"}, "42 or so", None, 1.0),
        (r"paris", {}, "Paris", None, 0.0),
        (r"paris", {"ignore_case": True}, "PARIS", None, 1.0),
        (r"straße", {"ignore_case": True}, "Straße", None, 1.0),
        (r"^b$", {}, "a\nb\nc", None, 0.0),
        (r"(?m)^b$", {}, "a\nb\nc", None, 1.0),
        (r"\d+", {}, "<think>42</think>none", None, 0.0),
        (r"\d+", {}, "<think>42", None, 0.0),
        (r"is (\w+)", {"group": 1}, "it is Rome", "Rome", 1.0),
        (r"is (\w+)", {"group": 1}, "it is Rome, no, it is Oslo", "Oslo", 1.0),
        (r"is (\w+)", {"group": 1}, "it is Rome, no, it is Oslo", "Rome", 0.0),
        (r"is (?P<city>\w+)", {"group": "city"}, "it is Rome", ["Oslo", "Rome"], 1.0),
        (r"is (\w+)", {"group": 1}, "Rome", "Rome", 0.0),
        (r"is (\w+)", {"group": 0}, "it is Rome", "is Rome", 1.0),
        (r"a(b)?", {"group": 1}, "a", "b", 0.0),
        (r"n = (\d+)", {"group": 1}, "n = 7", 7, 1.0),
        (r"\ud83d|x", {}, "x", None, None),
        (r"x", {}, "\ud83d x", None, 1.0),
    ],
)
def test_regex(pattern: str, options: dict[str, Any], action: str, answer: Any, expected: float | None) -> None:
    if expected is None:
        with pytest.raises(RewardError, match="which RE2 refuses"):
            Regex(pattern=pattern, **options)
        return
    info = {} if answer is None else {"answer": answer}
    assert Regex(pattern=pattern, **options)(episode("something else", action, **info)) == expected
    assert Regex(**options)(episode("something else", action, pattern=pattern, **info)) == expected


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|aa)+$", "(.*a){20}$", "(a*)*b"])
def test_k81_a_pattern_that_backtracks_takes_linear_time(pattern: str) -> None:
    started = time.process_time()
    assert Regex(pattern=pattern)(episode("a" * 50_000 + "!")) == 0.0
    assert time.process_time() - started < 5  # a backtracking engine takes years


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Regex(pattern="("), r"pattern is '\(', which RE2 refuses: missing \)"),
        (lambda: Regex(pattern=r"(a)\1"), "it has no backreferences and no look-around"),
        (lambda: Regex(pattern="(?=a)"), "which RE2 refuses"),
        (lambda: Regex(pattern="(a{1000}){1000}"), "which RE2 refuses"),
        (lambda: Regex(pattern=5), "pattern is 5; it must be a text"),  # type: ignore[arg-type]
        (lambda: Regex(pattern="a", match="fuzzy"), "regex: match is 'fuzzy'; it must be one of 'search', 'full'"),
        (lambda: Regex(pattern="(a)", group=2), r"group is 2; pattern '\(a\)' has the groups \[0, 1\]"),
        (lambda: Regex(pattern="(a)", group="x"), "group is 'x'"),
        (lambda: Regex()(episode("a")), "left no 'pattern' in info"),
        (lambda: Regex()(episode("a", pattern=["a"])), r"pattern is \['a'\]; it must be a text"),
        (lambda: Regex(pattern="(a)", group=1)(episode("a", answer={"a": 1})), r"info\['answer'\] is \{'a': 1\}"),
    ],
)
def test_regex_refuses_what_it_cannot_do(make: Any, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        make()


# --- JSON ------------------------------------------------------------------------------------------------------------

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^[A-Z]"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("action", "schema", "expected"),
    [
        ('{"name": "Ada", "age": 36}', PERSON, 1.0),
        ('{"name": "Ada"}', PERSON, 1.0),
        ('{"name": "ada"}', PERSON, 0.0),
        ('{"age": 36}', PERSON, 0.0),
        ('{"name": "Ada", "age": -1}', PERSON, 0.0),
        ('{"name": "Ada", "age": 1.5}', PERSON, 0.0),
        ('{"name": "Ada", "born": 1815}', PERSON, 0.0),
        ('{"name": "Ada", "name": "Bob"}', PERSON, 0.0),
        ("{'name': 'Ada'}", PERSON, 0.0),
        ('{"name": "Ada",}', PERSON, 0.0),
        ('Sure: {"name": "Ada"}', PERSON, 0.0),
        ('Sure:\n```json\n{"name": "Ada"}\n```', PERSON, 1.0),
        ('```\n{"name": "Ada"}\n```\nDone.', PERSON, 1.0),
        ('```json\n{"name": "ada"}\n```\nor\n```json\n{"name": "Ada"}\n```', PERSON, 1.0),
        ('```json\n{"name": "Ada"}\n```\nor\n```json\n{"name": "ada"}\n```', PERSON, 0.0),
        ('```python\n{"name": "Ada"}\n```', PERSON, 0.0),
        ('<answer>{"name": "Ada"}</answer>', PERSON, 1.0),
        ('<think>{"name": "Ada"}</think>', PERSON, 0.0),
        ('<think>{}</think>{"name": "Ada"}', PERSON, 1.0),
        ("", PERSON, 0.0),
        ("{}", {}, 1.0),
        ("NaN", {}, 0.0),
        ("[Infinity]", {}, 0.0),
        ("1" * 5000, {}, 0.0),
        ("[" * 20_000, {}, 0.0),
        ("[" * 20_000 + "]" * 20_000, {}, 0.0),
        (f'"{"x" * HUGE}"', {}, 0.0),
        ("1e400", {"type": "integer"}, 0.0),
        ("1e400", {"type": "number"}, 0.0),
        ("[-1e400]", {}, 0.0),
        ("1e400", {"multipleOf": 0.01}, 0.0),
        ("1e308", {"multipleOf": 0.01}, 1.0),
        ("19.99", {"multipleOf": 0.01}, 1.0),
        ("19.995", {"multipleOf": 0.01}, 0.0),
        ("9007199254740993", {"multipleOf": 2.0}, 0.0),
        ("1" * 401, {"multipleOf": 0.01}, 1.0),
        ("1" * 401, {"multipleOf": 0.3}, 0.0),
        ("6.0", {"multipleOf": 3}, 1.0),
        ("true", {"multipleOf": 3}, 1.0),
        ("[1, 1.0]", {"uniqueItems": True}, 0.0),
        ("[1, true]", {"uniqueItems": True}, 1.0),
        ('[{"a": 1, "b": [2]}, {"b": [2.0], "a": 1}]', {"uniqueItems": True}, 0.0),
        ("[1e400, 1e400]", {"uniqueItems": True}, 0.0),
        ('{"x_a": 1, "b": "c"}', {"patternProperties": {"^x_": {"type": "integer"}}}, 1.0),
        ('{"x_a": "1", "b": "c"}', {"patternProperties": {"^x_": {"type": "integer"}}}, 0.0),
        ('{"\\ud83d": "\\ud83d"}', {"patternProperties": {"a": {}}, "additionalProperties": {"pattern": "a"}}, 0.0),
    ],
)
def test_json_schema(action: str, schema: dict[str, Any], expected: float) -> None:
    assert JsonSchema(schema=schema)(episode("something else", action)) == expected
    assert JsonSchema()(episode("something else", action, schema=schema)) == expected


@pytest.mark.parametrize(
    ("schema", "action"),
    [
        ({"pattern": "^(a+)+$"}, f'"{"a" * 40_000}!"'),
        ({"patternProperties": {"^(a+)+$": False}}, f'{{"{"a" * 40_000}!": 1}}'),
        ({"uniqueItems": True}, f"[{','.join(f'[{number}]' for number in range(7000))}]"),
    ],
)
def test_k81_a_crafted_answer_does_not_hold_up_the_validator(schema: dict[str, Any], action: str) -> None:
    started = time.process_time()
    assert JsonSchema(schema=schema)(episode(action)) == float("!" not in action or "patternProperties" in schema)
    assert time.process_time() - started < 5


def test_nothing_a_schema_refers_to_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    monkeypatch.setattr(socket, "create_connection", lambda *args, **kwargs: called.append(args))
    with pytest.raises(RewardError, match=r"refers to 'http://127.0.0.1:9/schema.json'"):
        JsonSchema(schema={"$ref": "http://127.0.0.1:9/schema.json"})(episode("{}"))
    assert called == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: JsonSchema(schema={"type": "text"}), r"schema \{'type': 'text'\} is not valid: 'text' is not valid"),
        (lambda: JsonSchema(schema={"pattern": "(?=a)"}), "is not valid: invalid perl operator"),
        (lambda: JsonSchema(schema={"items": [1]}), "is not valid"),
        (lambda: JsonSchema(schema={"allOf": [{"pattern": "("}]}), r"is not valid: '\(' is not a 'regex'"),
        (lambda: JsonSchema(max_characters=0), "max_characters is 0; it must be a whole number from 1"),
        (lambda: JsonSchema()(episode("{}")), "left no 'schema' in info"),
        (lambda: JsonSchema()(episode("{}", schema=5)), "the schema 5 is not valid"),
    ],
)
def test_json_schema_refuses_what_it_cannot_do(make: Any, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        make()


@pytest.mark.parametrize(
    "reward", [GSM8K(), Regex(pattern="1"), JsonSchema(schema=PERSON)], ids=["gsm8k", "regex", "json_schema"]
)
def test_they_keep_the_contract_of_rewards(reward: Any) -> None:
    results = check_reward(reward, [episode("b", "#### 1", answer="1"), episode('{"name": "Ada"}', answer=2)])
    assert [result.name for result in results if not result.passed] == []
