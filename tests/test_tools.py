"""Envs with tools: schemas from methods, answers to calls good and bad."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
from typing import Any, Literal

import pytest
from reward_kit import episode

from relax_gym import Message, StepResult, ToolEnv, user
from relax_gym.env import check_step
from relax_gym.errors import EnvError
from relax_gym.tools import ToolError


class Desk(ToolEnv):
    """A desk with some tools."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        super().reset(seed=seed)
        return user("Work."), {}

    def on_answer(self, text: str) -> StepResult:
        return StepResult([], float(text == "done"), True, False, {})

    def add(self, a: int, b: int = 2) -> int:
        """Add two
        whole numbers.

        Not shown.

        Args:
            a (int): the first
                number
            b: the second

        Returns:
            The sum.
        """
        return a + b

    def search(self, json: str, kind: Literal["text", "image"], limit: int | None = None, tags: list[str] = []) -> Any:  # noqa: B006
        """Look for something."""
        if kind == "image":
            return [{"type": "image", "image": b"png"}, {"type": "text", "text": json}]
        return {"query": json, "limit": limit, "tags": tags}

    def fail(self, how: str) -> str:
        """Fail."""
        if how == "politely":
            raise ToolError("the drawer is locked")
        raise RuntimeError("the desk burns")

    def show(self) -> str:
        """Say something odd."""
        return "caf\u00e9 \ud800"

    def _private(self, x):  # type: ignore[no-untyped-def]
        return x

    @property
    def size(self) -> int:
        return 3

    @classmethod
    def maker(cls) -> str:
        return "ACME"

    @staticmethod
    def helper(x: int) -> int:
        return x

    def expert_action(self) -> str:
        return "done"


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def contents(env: ToolEnv, action: str) -> list[Any]:
    return [message["content"] for message in check_step(env.step(action)).observation]


@pytest.fixture
def desk() -> Desk:
    env = Desk()
    env.reset(seed=0)
    return env


def test_methods_become_json_schema_tools(desk: Desk) -> None:
    assert [tool["function"]["name"] for tool in desk.tools] == ["add", "search", "fail", "show"]
    assert desk.tools[0] == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two whole numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "the first number"},
                    "b": {"type": "integer", "description": "the second", "default": 2},
                },
                "required": ["a"],
            },
        },
    }
    assert desk.tools[1]["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "json": {"type": "string"},
            "kind": {"type": "string", "enum": ["text", "image"]},
            "limit": {"type": "integer", "nullable": True, "default": None},
            "tags": {"type": "array", "items": {"type": "string"}, "default": []},
        },
        "required": ["json", "kind"],
    }
    assert desk.tools[3]["function"]["parameters"] == {"type": "object", "properties": {}}


def test_each_call_is_answered_by_one_tool_message_in_order(desk: Desk) -> None:
    result = desk.step(call("add", a=1) + " and " + call("search", json="x", kind="text"))
    assert result == StepResult(
        [
            {"role": "tool", "name": "add", "tool_call_id": "call00001", "content": "3"},
            {
                "role": "tool",
                "name": "search",
                "tool_call_id": "call00002",
                "content": '{"query": "x", "limit": null, "tags": []}',
            },
        ],
        0.0,
        False,
        False,
        {
            "tool_log": [
                {"name": "add", "arguments": {"a": 1}, "error": None},
                {"name": "search", "arguments": {"json": "x", "kind": "text"}, "error": None},
            ]
        },
    )
    assert desk.step(call("add", a=1)).observation[0]["tool_call_id"] == "call00003"
    desk.reset(seed=0)
    assert desk.step(call("add", a=1)).observation[0]["tool_call_id"] == "call00001"
    given = desk.step('[TOOL_CALLS]add[CALL_ID]Zz9zZz9zZ[ARGS]{"a": 1}').observation[0]
    assert given["tool_call_id"] == "Zz9zZz9zZ"


def test_an_action_without_calls_goes_to_on_answer(desk: Desk) -> None:
    assert desk.step("done") == StepResult([], 1.0, True, False, {})
    with pytest.raises(EnvError, match="Silent does not implement on_answer"):
        Silent().step("hello")


class Silent(ToolEnv):
    """Has a tool but takes no answers."""

    def beep(self) -> str:
        """Beep."""
        return "beep"


def test_arguments_are_coerced_the_lax_way(desk: Desk) -> None:
    assert contents(desk, call("add", a="40", b=2.0)) == ["42"]
    assert contents(desk, call("search", json=7, kind="text")) == ['{"query": "7", "limit": null, "tags": []}']
    xml = "<function=search><parameter=json>[1]</parameter><parameter=kind>text</parameter>"
    xml += '<parameter=limit>null</parameter><parameter=tags>["a", "b"]</parameter></function>'
    assert contents(desk, xml) == ['{"query": "[1]", "limit": null, "tags": ["a", "b"]}']


def test_the_log_says_what_ran_and_what_did_not(desk: Desk) -> None:
    xml = "<function=search><parameter=json>[1]</parameter><parameter=kind>text</parameter>"
    xml += '<parameter=tags>["a"]</parameter></function>'
    actions = (
        xml + call("add", a="40", b=2.0) + call("add", a="one") + call("fly", to="Rome") + "<tool_call>{</tool_call>"
    )
    *ran, wrong, unknown, unread = desk.step(actions).info["tool_log"]
    assert ran == [
        {"name": "search", "arguments": {"json": "[1]", "kind": "text", "tags": ["a"]}, "error": None},
        {"name": "add", "arguments": {"a": 40, "b": 2}, "error": None},
    ]
    assert (wrong["name"], wrong["arguments"]) == ("add", {"a": "one"}) and "valid integer" in wrong["error"]
    assert (unknown["name"], unknown["arguments"]) == ("fly", {"to": "Rome"}) and "unknown tool" in unknown["error"]
    assert (unread["name"], unread["arguments"]) == (None, None) and "cannot be read" in unread["error"]


class Keeper(ToolEnv):
    """Changes what it is given."""

    def keep(self, anything: Any) -> str:
        """Keep it."""
        anything.clear()
        return "kept"


def test_the_log_is_a_copy_and_what_cannot_be_copied_is_the_models_fault() -> None:
    env = Keeper()
    env.reset(seed=0)
    assert env.step(call("keep", anything=[1])).info["tool_log"][0]["arguments"] == {"anything": [1]}
    deep: list[Any] = []
    for _ in range(400):
        deep = [deep]
    (message,) = env.step(call("keep", anything=deep)).observation
    assert message["content"] == "Error: wrong arguments for keep: Maximum serialization depth exceeded"


def test_a_trajectory_knows_the_turns_of_its_calls(desk: Desk) -> None:
    infos = [desk.step(action).info for action in (call("add", a=1) + call("show"), "hm", call("fail", how="politely"))]
    told = episode("a", "b", "c")
    turns = tuple(dataclasses.replace(turn, info=info) for turn, info in zip(told.turns, infos, strict=True))
    log = dataclasses.replace(told, turns=turns).tool_log
    assert [(entry["turn"], entry["name"], entry["error"]) for entry in log] == [
        (0, "add", None),
        (0, "show", None),
        (2, "fail", "the drawer is locked"),
    ]


def test_results_may_be_parts_and_never_hold_lone_surrogates(desk: Desk) -> None:
    assert contents(desk, call("search", json="x", kind="image")) == [
        [{"type": "image", "image": b"png"}, {"type": "text", "text": "x"}]
    ]
    assert contents(desk, call("show")) == ["café ?"]


@pytest.mark.parametrize(
    ("action", "said"),
    [
        (call("add"), "Error: wrong arguments for add: argument 'a' is missing. It takes: a, b"),
        (call("add", a=1, c=3), "Error: wrong arguments for add: there is no argument 'c'. It takes: a, b"),
        (call("show", x=1), "Error: wrong arguments for show: there is no argument 'x'. It takes: no arguments"),
        (
            call("add", a="one"),
            "Error: wrong arguments for add: argument 'a': Input should be a valid integer, "
            "unable to parse string as an integer, got 'one'. It takes: a, b",
        ),
        (call("fail", how="politely"), "Error: the drawer is locked"),
    ],
)
def test_a_call_that_cannot_be_made_is_answered_with_why(desk: Desk, action: str, said: str) -> None:
    assert contents(desk, action) == [said]


def test_k79_the_malformed_call_is_answered_and_the_good_ones_run(desk: Desk) -> None:
    result = desk.step(call("add", a=1) + "<tool_call>{'name': 'add'}</tool_call>" + call("add", a=2))
    assert [message["content"] for message in result.observation] == [
        "3",
        "Error: this tool call cannot be read: invalid JSON at character 1: Expecting property name enclosed in double "
        "quotes. You wrote: {'name': 'add'}",
        "4",
    ]
    assert result.observation[1]["name"] == "invalid"
    assert (result.reward, result.terminated) == (0.0, False)
    assert [entry["error"] is None for entry in result.info["tool_log"]] == [True, False, True]


def test_k80_an_unknown_tool_is_answered_with_the_known_ones(desk: Desk) -> None:
    for name in ("ad", "_private", "reset", "helper", "size"):
        (message,) = desk.step(call(name)).observation
        assert message["role"] == "tool"
        assert message["name"] == "invalid"
        assert message["content"].startswith(f"Error: unknown tool {name!r}")
        assert message["content"].endswith("Known: add, search, fail, show")
    assert "did you mean 'add'?" in contents(desk, call("ad"))[0]


def test_k81_a_call_is_never_evaluated(desk: Desk, tmp_path: Any) -> None:
    proof = tmp_path / "ran"
    payload = f"__import__('pathlib').Path({str(proof)!r}).touch()"
    for action in (
        f"<tool_call>{payload}</tool_call>",
        f"<tool_call>{{'name': {payload}}}</tool_call>",
        call("add", a=payload),
        call(payload),
        f"<function=add><parameter=a>{payload}</parameter></function>",
        f"<|python_tag|>{payload}",
        f"[TOOL_CALLS]add[ARGS]{payload}",
    ):
        assert contents(desk, action)[0].startswith("Error: ")
    assert not proof.exists()


def test_a_tool_that_breaks_is_an_error_of_the_env(desk: Desk) -> None:
    with pytest.raises(RuntimeError, match="the desk burns"):
        desk.step(call("fail", how="badly"))


def test_a_result_that_is_no_json_is_an_error_of_the_env() -> None:
    class Odd(ToolEnv):
        def get(self) -> Any:
            """Get it."""
            return object()

    with pytest.raises(EnvError, match=r"Odd\.get returned <object .*it must return text, parts or JSON"):
        Odd().step(call("get"))


class AsyncDesk(Desk):
    """A desk with a slow tool."""

    async def wait(self, turns: int) -> str:
        """Wait."""
        for _ in range(turns):
            await asyncio.sleep(0)
        return f"waited {turns}"

    def add(self, a: int, b: int = 5) -> int:
        """Add otherwise."""
        return a + b


def test_one_async_tool_makes_step_awaitable_and_sync_tools_still_work() -> None:
    env = AsyncDesk()
    env.reset(seed=0)
    assert [tool["function"]["name"] for tool in env.tools] == ["add", "search", "fail", "show", "wait"]
    step = env.step(call("wait", turns=3) + call("add", a=1))
    assert inspect.isawaitable(step)
    result: StepResult = asyncio.run(step)
    assert [message["content"] for message in result.observation] == ["waited 3", "6"]
    assert asyncio.run(env.step("done")) == StepResult([], 1.0, True, False, {})
    assert [tool["function"]["name"] for tool in Desk().tools] == ["add", "search", "fail", "show"]


def test_a_sync_tool_that_returns_an_unfinished_awaitable_is_refused() -> None:
    class Sneaky(ToolEnv):
        def get(self) -> Any:
            """Get it."""
            return asyncio.sleep(0)

    with pytest.raises(EnvError, match=r"Sneaky waited for something .* write it as async def"):
        Sneaky().step(call("get"))


def untyped(self, x):  # type: ignore[no-untyped-def]
    """Do."""


def undocumented(self: Any, x: int) -> None: ...


def starred(self: Any, *x: int) -> None:
    """Do."""


def unresolved(self: Any, x: Missing) -> None:  # type: ignore[name-defined]  # noqa: F821
    """Do."""


def unschematic(self: Any, x: Desk) -> None:
    """Do."""


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (untyped, r"Bad\.act has no type for argument 'x'; write `x: str` or so"),
        (undocumented, r"Bad\.act is a tool without a docstring; say in one what it does"),
        (starred, r"Bad\.act takes \*x: 'int'; a tool's arguments must be named one by one"),
        (unresolved, r"Bad\.act has an annotation that cannot be resolved: name 'Missing' is not defined"),
        (unschematic, r"Bad\.act has an argument type that has no JSON schema"),
    ],
)
def test_a_method_that_cannot_be_a_tool_is_refused_when_the_env_is_built(method: Any, message: str) -> None:
    env_class = type("Bad", (ToolEnv,), {"act": method})
    with pytest.raises(EnvError, match=message):
        env_class()


def test_an_env_without_tools_is_refused() -> None:
    class Empty(ToolEnv):
        pass

    with pytest.raises(EnvError, match="Empty has no tools; add a public method"):
        Empty()
