"""Texts that repeat themselves are worse."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from relax_gym.types import Trajectory
from relax_gym_rewards._answers import choice_option, number_option
from relax_gym_rewards.length import HUGE

# scripts without spaces: a character is a word, or a repeated text would be one long word
_CJK = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
WORD = re.compile(rf"[{_CJK}]|[^\W{_CJK}]+")


def repeated_share(items: Sequence[object], n: int) -> float:
    """The share of the n-grams of `items` that stood there before; 0 when there are fewer than two."""
    grams = len(items) - n + 1
    if grams < 2:
        return 0.0
    return 1.0 - len(set(zip(*(items[start : start + grams] for start in range(n)), strict=True))) / grams


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """`-penalty` times the share of n-grams that repeat earlier ones of their turn; the worst turn (arXiv 2502.03373).

    `unit` is "words" (a CJK character is one; case and punctuation do not count), "characters" or "tokens".
    """

    n: int = 3
    penalty: float = 1.0
    unit: str = "words"

    def __post_init__(self) -> None:
        number_option("repetition", "n", self.n, 1, 100, integer=True)
        number_option("repetition", "penalty", self.penalty, 0, HUGE)
        choice_option("repetition", "unit", self.unit, ("words", "characters", "tokens"))

    def __call__(self, trajectory: Trajectory, /) -> float:
        shares = [
            repeated_share(self._items(turn.text, turn.completion.token_ids), self.n) for turn in trajectory.turns
        ]
        return -self.penalty * max(shares, default=0.0)

    def _items(self, text: str, token_ids: tuple[int, ...]) -> Sequence[object]:
        if self.unit == "tokens":
            return token_ids
        return text if self.unit == "characters" else WORD.findall(text.casefold())
