"""1 when the last action is the reference answer, else 0."""

from __future__ import annotations

from dataclasses import dataclass

from relax_gym.types import Trajectory
from relax_gym_rewards._answers import references
from relax_gym_rewards._episode import final_action

QUOTES = "\"'`*“”‘’"
SENTENCE_END = ".,;:!?"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactMatch:
    """Compares the whole last action with `info[field]`, or with any item when that is a list.

    Runs of white space count as one space. `strip_punctuation` ignores quotes and emphasis marks around the text and
    sentence punctuation after it; a leading "." or "-" stays, because it changes a number.
    """

    field: str = "answer"
    ignore_case: bool = True
    strip_punctuation: bool = True

    def __call__(self, trajectory: Trajectory, /) -> float:
        allowed = references(trajectory, self.field, "exact_match")
        given = self._normalise(final_action(trajectory))
        return float(any(given == self._normalise(item) for item in allowed))

    def _normalise(self, text: str) -> str:
        text = " ".join(text.split())
        if self.ignore_case:
            text = text.casefold()
        if self.strip_punctuation:
            stripped = text.strip(QUOTES).rstrip(SENTENCE_END + QUOTES).strip()
            text = stripped or text  # an answer that is all punctuation is compared as it is
        return text
