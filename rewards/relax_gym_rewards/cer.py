"""1 minus the character error rate of a transcript."""

from __future__ import annotations

from relax_gym.types import Trajectory
from relax_gym_rewards._answers import library
from relax_gym_rewards._speech import transcripts


class CER:
    """1 - CER, not below 0, of the last action (its last `<answer>` tag, without thinking) against `info[field]`.

    Of a list the best reference counts. `normalise` ignores case, punctuation and forms of the same character.
    """

    def __init__(self, *, field: str = "answer", normalise: bool = True) -> None:
        self.field, self.normalise = field, normalise
        self._jiwer = library("jiwer", "cer")

    def __call__(self, trajectory: Trajectory, /) -> float:
        heard, said = transcripts(trajectory, self.field, "cer", normalise=self.normalise)
        return max(self._score(heard, text) for text in said)

    def _score(self, heard: str, said: str) -> float:
        if len(heard) >= 2 * len(said):  # as many extra characters as there should be: the rate is 1 or more
            return 0.0
        return max(0.0, 1.0 - float(self._jiwer.cer(said, heard)))
