"""1 when the last number of the last action is the reference number, else 0."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from relax_gym.errors import RewardError
from relax_gym.types import Trajectory
from relax_gym_rewards._answers import answer_text, choice_option, references
from relax_gym_rewards._units import converted, tidy, unit_at

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
    the reference is itself a percentage. The reference is a number, a text whose last number counts, or a
    list of these, any of which will do.

    `units`: "ignore" what stands behind the numbers; "optional" ones must fit where both have one ("5 km" is 5000 m);
    "required" ones must be there, too. Thinking is left out.
    """

    tolerance: float = 1e-6
    field: str = "answer"
    units: str = "ignore"

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < math.inf:
            raise RewardError(f"numeric: tolerance is {self.tolerance}; it must be finite and 0 or more")
        choice_option("numeric", "units", self.units, ("ignore", "optional", "required"))

    def __call__(self, trajectory: Trajectory, /) -> float:
        targets = [self._target(expected) for expected in references(trajectory, self.field, "numeric")]
        given = last_measure(answer_text(trajectory))
        return float(given is not None and any(self._right(given, target) for target in targets))

    def _target(self, expected: str) -> Measure:
        target = last_measure(expected)
        if target is None:
            raise RewardError(f"numeric: info[{self.field!r}] is {expected!r:.100}, which holds no number")
        if self.units == "required" and target.unit is None:
            raise RewardError(f"numeric: info[{self.field!r}] is {expected!r:.100}, with no unit of its table")
        return target

    def _right(self, given: Measure, target: Measure) -> bool:
        if self.units != "ignore" and target.unit is not None:
            return self._measures(given, target, target.unit)
        allowed = readings(given.value, given.percent and not target.percent)
        return any(self._equal(value, target.value) for value in allowed)

    def _measures(self, given: Measure, target: Measure, unit: str) -> bool:
        if given.unit is None:
            return self.units == "optional" and not given.percent and self._equal(given.value, target.value)
        value = converted(given.value, given.unit, unit)
        return value is not None and self._equal(value, target.value)

    def _equal(self, value: float, target: float) -> bool:
        return math.isclose(value, target, rel_tol=0.0, abs_tol=self.tolerance * max(1.0, abs(target)))


@dataclass(frozen=True, slots=True)
class Measure:
    """A number, whether it is written as a percentage ("50%" is 0.5), and the unit behind it."""

    value: float
    percent: bool
    unit: str | None


def last_measure(text: str) -> Measure | None:
    """The last number in a text with what stands behind it; None when there is none."""
    text = tidy(text)
    matches = list(NUMBER.finditer(text))
    return Measure(*_value(matches[-1]), unit_at(text, matches[-1].end())) if matches else None


def last_number(text: str) -> tuple[float, bool] | None:
    """The last number in a text and whether it is written as a percentage ("50%" is 0.5); None when there is none."""
    matches = list(NUMBER.finditer(text))
    return _value(matches[-1]) if matches else None


def first_number(text: str) -> tuple[float, bool] | None:
    """The first number in a text, as `last_number` gives the last."""
    found = NUMBER.search(text)
    return None if found is None else _value(found)


def readings(value: float, percent: bool) -> tuple[float, ...]:
    """What a number may stand for: with `percent` itself ("50%" for 0.5) and a hundred times itself (50)."""
    return (value, 100 * value) if percent else (value,)


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
