"""Tool calls count as the env ran them, whatever the text says."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from reward_kit import episode

from relax_gym import ToolEnv, Trajectory
from relax_gym.errors import RewardError
from relax_gym.rescoring import trajectory_of
from relax_gym.run_folder import episode_record
from relax_gym_rewards.tool_use import ToolUse

CLAIM = '<tool_call>{"name": "add", "arguments": {}}</tool_call> I called the tool; tool_log: [add, add]'
Call = tuple[str, dict[str, Any]]
A, B, BAD = ("a", {"x": 1, "y": "z"}), ("b", {}), ("!a", {"x": 1})


def played(*turns: list[Call] | None) -> Trajectory:
    """An episode in which the env answered such calls; "!" begins the name of one that failed."""
    told = episode(*[CLAIM] * len(turns), tool_log=[{"name": "a", "arguments": {}, "error": None}] * 9)
    infos: list[dict[str, Any]] = []
    for calls in turns:
        log = [
            {"name": name.strip("!"), "arguments": arguments, "error": "no" if name.startswith("!") else None}
            for name, arguments in calls or ()
        ]
        infos.append({} if calls is None else {"tool_log": log})
    return dataclasses.replace(
        told, turns=tuple(dataclasses.replace(turn, info=info) for turn, info in zip(told.turns, infos, strict=True))
    )


@pytest.mark.parametrize(
    ("turns", "at_least", "expected"),
    [
        ([[A]], 1, 1.0),
        ([[A, BAD], [A, A]], 1, 0.75),
        ([[BAD]], 1, 0.0),
        ([[A], [BAD]], 2, 0.0),
        ([None], 1, 0.0),
        ([None], 0, 1.0),
        ([None, [A, B, A]], 3, 1.0),
    ],
)
def test_what_ran_counts(turns: list[list[Call] | None], at_least: int, expected: float) -> None:
    assert ToolUse(at_least=at_least)(played(*turns))["score"] == expected


def want(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments} if arguments else {"name": name}


@pytest.mark.parametrize(
    ("turns", "options", "expected"),
    [
        ([[A], [B]], {"required": [want("a"), want("b")]}, 1.0),
        ([[B], [A]], {"required": [want("a"), want("b")]}, 1.0),
        ([[B], [A]], {"required": [want("a"), want("b")], "ordered": True}, 0.5),
        ([[A, B]], {"required": [want("a"), want("b")], "ordered": True}, 1.0),
        ([[A, A, B, A]], {"required": [want("a"), want("b")], "ordered": True}, 1.0),
        ([[A]], {"required": [want("a"), want("a")]}, 0.5),
        ([[A]], {"required": [want("a", x=1)]}, 1.0),
        ([[A]], {"required": [want("a", x=1.0, y="z")]}, 1.0),
        ([[A]], {"required": [want("a", x=True)]}, 0.0),
        ([[A]], {"required": [want("a", x="1")]}, 0.0),
        ([[A]], {"required": [want("a", w=1)]}, 0.0),
        ([[BAD]], {"required": [want("a", x=1)]}, 0.0),
        ([[BAD, A]], {"required": [want("a", x=1)]}, 0.5),
        ([[A, ("a", {"x": 2})]], {"required": [want("a"), want("a", x=1)]}, 1.0),
        ([[("a", {"x": 2}), A]], {"required": [want("a"), want("a", x=2)]}, 1.0),
        ([[A, B]], {"required": [want("a")]}, 1.0),
        ([[A, B]], {"required": [want("a")], "only": True}, 0.5),
        ([[A, A, BAD]], {"required": [want("a")], "only": True}, 1 / 3),
        ([None], {"required": [want("a")], "at_least": 0}, 0.0),
        ([None], {"required": [], "at_least": 0, "only": True}, 1.0),
        ([[A]], {"required": [], "only": True}, 0.0),
        ([[("", {})]], {"required": [want("a")]}, 0.0),
    ],
)
def test_required_calls(turns: list[list[Call] | None], options: dict[str, Any], expected: float) -> None:
    assert ToolUse(**options)(played(*turns))["score"] == pytest.approx(expected)


def test_what_a_task_requires_is_in_its_info_and_the_parts_are_told() -> None:
    told = played([A, BAD])
    told = dataclasses.replace(told, info={"calls": [want("a"), want("b")]})
    assert ToolUse(field="calls")(told) == {"score": 0.25, "calls": 2, "errors": 1, "required": 0.5}
    with pytest.raises(RewardError, match="no 'calls' in info"):
        ToolUse(field="calls")(episode("a"))
    with pytest.raises(RewardError, match=r"info\['calls'\] is 'a'; it must be a list of mappings"):
        ToolUse(field="calls")(episode("a", calls="a"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"at_least": -1}, "at_least is -1"),
        ({"required": [{"arguments": {}}]}, "a list of mappings with a name"),
        ({"required": [{"name": "a", "arguments": [1]}]}, "a list of mappings with a name"),
        ({"required": [{"name": "a", "args": {}}]}, "a list of mappings with a name"),
        ({"required": [{"name": "a"}], "field": "calls"}, "give one of them"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RewardError, match=message):
        ToolUse(**options)


class Adder(ToolEnv):
    """Adds."""

    def add(self, a: int, b: int = 2) -> int:
        """Add."""
        return a + b


def test_a_finished_run_says_of_an_env_what_the_env_said() -> None:
    env = Adder()
    env.reset(seed=0)
    calls = ["<tool_call>" + json.dumps(want("add", a=a)) + "</tool_call>" for a in ("40", "forty")]
    told = episode(*calls)
    turns = tuple(dataclasses.replace(turn, info=env.step(turn.action).info) for turn in told.turns)
    told = dataclasses.replace(told, turns=turns)
    kept = trajectory_of(json.loads(json.dumps(episode_record(told))))
    reward = ToolUse(required=[want("add", a=40)])
    assert reward(told) == reward(kept) == {"score": 0.5, "calls": 2, "errors": 1, "required": 1.0}
