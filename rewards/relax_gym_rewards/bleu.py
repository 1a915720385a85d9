"""Sentence BLEU of a translation."""

from __future__ import annotations

from typing import Any

from relax_gym.types import Trajectory
from relax_gym_rewards._answers import answer_text, choice_option, library, references, stated_answer

TOKENIZERS = ("13a", "intl", "zh", "char", "none")


class BLEU:
    """sacrebleu's sentence BLEU, 0 to 1, of the last action against `info[field]`, one text or several at once.

    Looks at the last `<answer>` tag, else at all of it, without thinking. Short texts count only the n-grams they can
    have (`effective_order`). `tokenize` is "13a", "intl", "zh", "char" or "none".
    """

    def __init__(self, *, field: str = "answer", tokenize: str = "13a", lowercase: bool = False) -> None:
        choice_option("bleu", "tokenize", tokenize, TOKENIZERS)
        self.field = field
        metric = library("sacrebleu.metrics", "bleu").BLEU
        self._bleu: Any = metric(effective_order=True, tokenize=tokenize, lowercase=lowercase)

    def __call__(self, trajectory: Trajectory, /) -> float:
        expected = references(trajectory, self.field, "bleu")
        given = stated_answer(answer_text(trajectory))
        return min(1.0, float(self._bleu.sentence_score(given, expected).score) / 100)
