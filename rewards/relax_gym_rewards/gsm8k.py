"""1 when the answer to a GSM8K problem is the reference, else 0."""

from __future__ import annotations

import math
from dataclasses import dataclass

from relax_gym.errors import RewardError
from relax_gym.types import Trajectory
from relax_gym_rewards._answers import answer_text, references
from relax_gym_rewards.numeric import first_number, last_number

MARK = "####"


@dataclass(frozen=True, slots=True, kw_only=True)
class GSM8K:
    """The number after the last "####" (arXiv 2110.14168) against the one in `info[field]`, a solution or a number.

    Without "####" the last number counts, unless `strict`. "1,234", "$5" and "7.0" are understood.
    """

    field: str = "answer"
    strict: bool = False

    def __call__(self, trajectory: Trajectory, /) -> float:
        targets = [self._target(expected) for expected in references(trajectory, self.field, "gsm8k")]
        given = gsm8k_number(answer_text(trajectory), strict=self.strict)
        return float(given is not None and any(math.isclose(given, target, rel_tol=1e-9) for target in targets))

    def _target(self, expected: str) -> float:
        target = gsm8k_number(expected)
        if target is None:
            raise RewardError(
                f"gsm8k: info[{self.field!r}] is {expected!r:.100}; it must be a number or '… #### number'"
            )
        return target


def gsm8k_number(text: str, *, strict: bool = False) -> float | None:
    """The number after the last "####" of its line; without the mark the last one of the text, unless `strict`."""
    _, mark, after = text.rpartition(MARK)
    found = first_number(after.partition("\n")[0]) if mark else None if strict else last_number(text)
    return None if found is None else found[0]
