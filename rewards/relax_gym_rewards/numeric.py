"""1 when the last number of the last action is the reference number, else 0."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from relax_gym.errors import RewardError
from relax_gym.types import Trajectory
from relax_gym_rewards._episode import final_action, reference

_UNSIGNED = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|(?<!\.)\.[0-9]+"
# a minus right after a word, a digit or a bracket is a hyphen or a subtraction, not a sign
NUMBER = re.compile(
    rf"(?<![A-Za-z0-9_])(?<![0-9]\.)(?P<sign>(?<![)\]])[-+−])?(?:[$€£]\s?)?(?P<top>{_UNSIGNED})"
    rf"(?:\s?/\s?(?P<bottom>{_UNSIGNED}))?(?P<percent>\s?\\?%)?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Numeric:
    """Compares numbers, not text: "1,234", "-0.5", "3/4", "12%", "$5", "1e3" are understood.

    Equal means within `tolerance`, absolute and relative to the reference. "50%" is right for 0.5 and for 50, unless
    the reference is itself a percentage. The reference is a number or a text whose last number counts.
    """

    tolerance: float = 1e-6
    field: str = "answer"

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < math.inf:
            raise RewardError(f"numeric: tolerance is {self.tolerance}; it must be finite and 0 or more")

    def __call__(self, trajectory: Trajectory, /) -> float:
        expected = reference(trajectory, self.field)
        target = last_number(str(expected))
        if target is None:
            raise RewardError(f"numeric: info[{self.field!r}] is {expected!r:.100}, which holds no number")
        given = last_number(final_action(trajectory))
        if given is None:
            return 0.0
        readings = {given[0]} if target[1] or not given[1] else {given[0], 100 * given[0]}
        return float(any(self._equal(value, target[0]) for value in readings))

    def _equal(self, value: float, target: float) -> bool:
        return math.isclose(value, target, rel_tol=0.0, abs_tol=self.tolerance * max(1.0, abs(target)))


def last_number(text: str) -> tuple[float, bool] | None:
    """The last number in a text and whether it is written as a percentage ("50%" is 0.5); None when there is none."""
    matches = list(NUMBER.finditer(text))
    return _value(matches[-1]) if matches else None


def first_number(text: str) -> tuple[float, bool] | None:
    """The first number in a text, as `last_number` gives the last."""
    found = NUMBER.search(text)
    return None if found is None else _value(found)


def _value(found: re.Match[str]) -> tuple[float, bool]:
    value = _float(found["top"])
    if found["bottom"] is not None:
        bottom = _float(found["bottom"])
        value = value / bottom if bottom else math.nan
    if found["sign"] in ("-", "−"):
        value = -value
    return (value / 100 if found["percent"] else value), bool(found["percent"])


def _float(digits: str) -> float:
    return float(digits.replace(",", ""))
