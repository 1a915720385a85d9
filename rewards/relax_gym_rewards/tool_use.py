"""How well tools were called, by what the env ran."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from relax_gym.errors import RewardError
from relax_gym.types import Trajectory
from relax_gym_rewards._episode import reference

Pairs = Callable[[int, int], bool]


class ToolUse:
    """The share of tool calls that the env ran without an error, times the share of the `required` ones among them.

    Looks at `Trajectory.tool_log`, which a `ToolEnv` keeps; what the text says of calls counts nothing. A required call
    is a mapping with a tool's `name` and, if they matter, some of its `arguments`; an executed call meets one of them
    at most, and with `ordered` they are met in their order. They are those of `info[field]`, a list, if there is a
    `field`. With `only`, calls that meet none count as errors. Fewer calls than `at_least` without an error: 0.0.
    """

    key = "score"

    def __init__(
        self,
        *,
        at_least: int = 1,
        required: Sequence[Mapping[str, Any]] = (),
        field: str = "",
        ordered: bool = False,
        only: bool = False,
    ) -> None:
        if at_least < 0:
            raise RewardError(f"tool_use: at_least is {at_least}; it must be 0 or more")
        if required and field:
            raise RewardError(f"tool_use: there is required and field = {field!r}; give one of them")
        self.required = _checked(required, "required")
        self.at_least, self.field, self.ordered, self.only = at_least, field, ordered, only

    def __call__(self, trajectory: Trajectory, /) -> dict[str, float]:
        wanted = self.required
        if self.field:
            wanted = _checked(reference(trajectory, self.field), f"info[{self.field!r}]")
        log = trajectory.tool_log
        ran = [call for call in log if call["error"] is None]

        def pair(at: int, call: int) -> bool:
            return _meets(ran[call], wanted[at])

        met = (_in_order if self.ordered else _in_any_order)(len(wanted), len(ran), pair)
        right = met if self.only else len(ran)
        found = met / len(wanted) if wanted else 1.0
        score = found * (right / len(log) if log else 1.0) if len(ran) >= self.at_least else 0.0
        return {"score": score, "calls": len(log), "errors": len(log) - len(ran), "required": found}


def _checked(calls: Any, where: str) -> Sequence[Mapping[str, Any]]:
    right = isinstance(calls, list | tuple) and all(
        isinstance(call, Mapping)
        and isinstance(call.get("name"), str)
        and isinstance(call.get("arguments", {}), Mapping)
        and call.keys() <= {"name", "arguments"}
        for call in calls
    )
    if not right:
        raise RewardError(
            f"tool_use: {where} is {calls!r:.200}; it must be a list of mappings with a name and, if they matter, "
            'arguments: { name = "search", arguments = { query = "x" } }'
        )
    checked: Sequence[Mapping[str, Any]] = calls
    return checked


def _meets(call: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    given = call["arguments"]
    return bool(call["name"] == wanted["name"]) and all(
        key in given and _same(given[key], value) for key, value in wanted.get("arguments", {}).items()
    )


def _same(one: Any, other: Any) -> bool:
    """Equal, where 1 is 1.0 but not true."""
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def _in_any_order(wanted: int, calls: int, pair: Pairs) -> int:
    """How many can be met when each call meets one: a largest matching, by augmenting paths."""
    taken: dict[int, int] = {}

    def place(at: int, tried: set[int]) -> bool:
        for call in range(calls):
            if call not in tried and pair(at, call):
                tried.add(call)
                if call not in taken or place(taken[call], tried):
                    taken[call] = at
                    return True
        return False

    return sum(place(at, set()) for at in range(wanted))


def _in_order(wanted: int, calls: int, pair: Pairs) -> int:
    """The length of the longest common subsequence."""
    best = [0] * (calls + 1)
    for at in range(wanted):
        before = best
        best = [0]
        for call in range(calls):
            best.append(max(before[call] + pair(at, call), before[call + 1], best[call]))
    return best[calls]
