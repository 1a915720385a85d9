"""1 when the letter that the model states at the end is GPQA's, else 0."""

from __future__ import annotations

from dataclasses import dataclass

from relax_gym.errors import RewardError
from relax_gym.types import Trajectory
from relax_gym_rewards._answers import answer_text
from relax_gym_rewards.multiple_choice import choices_of, chosen_letter, right_letter

LETTERS = "ABCD"


@dataclass(frozen=True, slots=True, kw_only=True)
class GPQA:
    r"""The last "Answer: B", "the answer is B", `\boxed{B}` or `<answer>B</answer>` against `info[field]`.

    As GPQA's prompts ask (arXiv 2311.12022), a letter elsewhere does not count. `info[field]` is one of A to D, an
    index from 0, or the text of one of the four `info[choices]`.
    """

    field: str = "answer"
    choices: str = "choices"

    def __call__(self, trajectory: Trajectory, /) -> float:
        choices = choices_of(trajectory, self.choices, "gpqa")
        if choices and len(choices) != len(LETTERS):
            raise RewardError(f"gpqa: info[{self.choices!r}] holds {len(choices)} choices; GPQA has four")
        right = right_letter(trajectory, self.field, LETTERS, choices, "gpqa")
        return float(chosen_letter(answer_text(trajectory), LETTERS, choices, strict=True) == right)
