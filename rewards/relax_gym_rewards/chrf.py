"""Sentence chrF of a translation."""

from __future__ import annotations

from typing import Any

from relax_gym.types import Trajectory
from relax_gym_rewards._answers import answer_text, library, number_option, references, stated_answer


class ChrF:
    """sacrebleu's sentence chrF, 0 to 1, of the last action against the best of `info[field]`, one text or several.

    Looks at the last `<answer>` tag, else at all of it, without thinking. `word_order = 2` makes it chrF++.
    """

    def __init__(self, *, field: str = "answer", word_order: int = 0, lowercase: bool = False) -> None:
        number_option("chrf", "word_order", word_order, 0, 4, integer=True)
        self.field = field
        metric = library("sacrebleu.metrics", "chrf").CHRF
        self._chrf: Any = metric(word_order=word_order, lowercase=lowercase)

    def __call__(self, trajectory: Trajectory, /) -> float:
        expected = references(trajectory, self.field, "chrf")
        given = stated_answer(answer_text(trajectory))
        return min(1.0, float(self._chrf.sentence_score(given, expected).score) / 100)
