"""Overlap of the words of the answer with those of the reference."""

from __future__ import annotations

from dataclasses import dataclass

from relax_gym.types import Trajectory
from relax_gym_rewards._answers import answer_text, references, stated_answer
from relax_gym_rewards._squad import compared, overlap_f1


@dataclass(frozen=True, slots=True, kw_only=True)
class F1:
    """SQuAD F1, 0 to 1, with `info[field]`, or with the best item when that is a list; "" means no answer.

    Looks at the last `<answer>` tag of the last action, else at all of it, without thinking.
    """

    field: str = "answer"

    def __call__(self, trajectory: Trajectory, /) -> float:
        allowed = references(trajectory, self.field, "f1")
        answer = stated_answer(answer_text(trajectory))
        return max(overlap_f1(*compared(answer, item)) for item in allowed)
