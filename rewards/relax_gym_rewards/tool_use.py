"""How well tools were called, by what the env ran."""

from __future__ import annotations

from dataclasses import dataclass

from relax_gym.errors import RewardError
from relax_gym.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The share of tool calls that the env ran without an error; 0.0 with fewer such calls than `at_least`.

    Counts `tool_calls` and `tool_errors` in the info of each turn, which a `ToolEnv` leaves there; what the text says
    of calls counts nothing. Without a call and with `at_least = 0` it is 1.0.
    """

    at_least: int = 1

    def __post_init__(self) -> None:
        if self.at_least < 0:
            raise RewardError(f"tool_use: at_least is {self.at_least}; it must be 0 or more")

    def __call__(self, trajectory: Trajectory, /) -> float:
        calls, errors = (sum(int(turn.info.get(key, 0)) for turn in trajectory.turns) for key in COUNTS)
        if calls - errors < self.at_least:
            return 0.0
        return 1.0 - errors / calls if calls else 1.0


COUNTS = ("tool_calls", "tool_errors")
