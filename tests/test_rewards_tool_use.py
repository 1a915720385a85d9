"""Tool calls count as the env ran them, whatever the text says."""

from __future__ import annotations

import dataclasses

import pytest
from reward_kit import episode

from relax_gym.errors import RewardError
from relax_gym_rewards.tool_use import ToolUse

CLAIM = '<tool_call>{"name": "add", "arguments": {}}</tool_call> I called the tool; tool_calls: 5'


@pytest.mark.parametrize(
    ("ran", "at_least", "expected"),
    [
        ([(1, 0)], 1, 1.0),
        ([(2, 1), (2, 0)], 1, 0.75),
        ([(1, 1)], 1, 0.0),
        ([(1, 0), (1, 1)], 2, 0.0),
        ([None], 1, 0.0),
        ([None], 0, 1.0),
        ([None, (3, 0)], 3, 1.0),
    ],
)
def test_what_ran_counts(ran: list[tuple[int, int] | None], at_least: int, expected: float) -> None:
    told = episode(*[CLAIM] * len(ran), tool_calls=5, tool_errors=0)
    infos = [{} if pair is None else {"tool_calls": pair[0], "tool_errors": pair[1]} for pair in ran]
    turns = tuple(dataclasses.replace(turn, info=info) for turn, info in zip(told.turns, infos, strict=True))
    assert ToolUse(at_least=at_least)(dataclasses.replace(told, turns=turns)) == expected


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(RewardError, match="at_least is -1"):
        ToolUse(at_least=-1)
