"""1 when the answer to a GSM8K problem is the reference, else 0."""

from __future__ import annotations

import math
from dataclasses import dataclass

from relax_gym.errors import RewardError
from relax_gym.types import Trajectory
from relax_gym_rewards._answers import answer_text, references
from relax_gym_rewards.numeric import first_number, last_number, readings

MARK = "####"


@dataclass(frozen=True, slots=True, kw_only=True)
class GSM8K:
    """The number after the last "####" (arXiv 2110.14168) against the one in `info[field]`, a solution or a number.

    Without "####" the last number counts, unless `strict`. "1,234", "$5", "7.0" and "25%" are understood.
    """

    field: str = "answer"
    strict: bool = False

    def __call__(self, trajectory: Trajectory, /) -> float:
        targets = [self._target(expected) for expected in references(trajectory, self.field, "gsm8k")]
        given = gsm8k_number(answer_text(trajectory), strict=self.strict)
        return float(given is not None and any(_right(given, target) for target in targets))

    def _target(self, expected: str) -> tuple[float, bool]:
        target = gsm8k_number(expected)
        if target is None:
            raise RewardError(
                f"gsm8k: info[{self.field!r}] is {expected!r:.100}; it must be a number or '… #### number'"
            )
        return target


def gsm8k_number(text: str, *, strict: bool = False) -> tuple[float, bool] | None:
    """The number after the last "####" of its line; without the mark the last one of the text, unless `strict`.

    With it whether it is written as a percentage ("50%" is 0.5).
    """
    _, mark, after = text.rpartition(MARK)
    return first_number(after.partition("\n")[0]) if mark else None if strict else last_number(text)


def _right(given: tuple[float, bool], target: tuple[float, bool]) -> bool:
    (value, percent), (expected, expected_percent) = given, target
    return any(
        math.isclose(reading, expected, rel_tol=1e-9) for reading in readings(value, percent and not expected_percent)
    )
