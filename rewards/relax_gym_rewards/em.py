"""1 when the answer is the reference after SQuAD's normalisation, else 0."""

from __future__ import annotations

from dataclasses import dataclass

from relax_gym.types import Trajectory
from relax_gym_rewards._answers import answer_text, references, stated_answer
from relax_gym_rewards._squad import compared


@dataclass(frozen=True, slots=True, kw_only=True)
class EM:
    """SQuAD exact match with `info[field]`, or with any item when that is a list; "" means that there is no answer.

    Looks at the last `<answer>` tag of the last action, else at all of it, without thinking.
    """

    field: str = "answer"

    def __call__(self, trajectory: Trajectory, /) -> float:
        allowed = references(trajectory, self.field, "em")
        answer = stated_answer(answer_text(trajectory))
        return float(any(given == expected for given, expected in (compared(answer, item) for item in allowed)))
