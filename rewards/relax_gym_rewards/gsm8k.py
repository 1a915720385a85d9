"""1 when the answer to a GSM8K problem is the reference, else 0."""

from __future__ import annotations

import math
from dataclasses import dataclass

from relax_gym.errors import RewardError
from relax_gym.types import Trajectory
from relax_gym_rewards._answers import answer_text
from relax_gym_rewards._episode import reference
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
        expected = reference(trajectory, self.field)
        target = gsm8k_number(str(expected)) if isinstance(expected, (str, int, float)) else None
        if target is None or isinstance(expected, bool):
            raise RewardError(
                f"gsm8k: info[{self.field!r}] is {expected!r:.100}; it must be a number or '… #### number'"
            )
        given = gsm8k_number(answer_text(trajectory), strict=self.strict)
        return float(given is not None and math.isclose(given, target, rel_tol=1e-9, abs_tol=1e-9))


def gsm8k_number(text: str, *, strict: bool = False) -> float | None:
    """The number after the last "####" of its line; without the mark the last one of the text, unless `strict`."""
    _, mark, after = text.rpartition(MARK)
    found = first_number(after.partition("\n")[0]) if mark else None if strict else last_number(text)
    return None if found is None else found[0]
