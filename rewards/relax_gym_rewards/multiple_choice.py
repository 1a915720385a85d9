"""1 when the letter that the model chose is the right one, else 0."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from relax_gym.errors import RewardError
from relax_gym.types import Trajectory
from relax_gym_rewards._answers import answer_text, boxed, tagged
from relax_gym_rewards._episode import reference

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_WRAPPING = re.compile(r"^\\(?:text|textbf|mathrm|mathbf)\{(.*)\}$")


def chosen_letter(text: str, letters: str, choices: Sequence[str] = (), *, strict: bool = False) -> str | None:
    r"""The one of `letters` (capitals) that a text settles on; None when it settles on none or on several.

    What counts is, in this order, the last `<answer>` tag, the last `\boxed{}`, the last "the answer is B" or
    "Answer: (B)", and unless `strict` a text that is a letter, a choice word for word, or names just one "(B)" or "B.".
    """
    for inside in (tagged(text), boxed(text)):
        if inside is not None:
            text, strict = inside, False
            break
    stated = _stated(text, letters)
    if stated:
        return stated[0] if len(stated) == 1 else None
    return None if strict else _bare(text, letters, choices)


def _stated(text: str, letters: str) -> str:
    """The letter of the last statement, "" without one, and more than a letter when it goes on with "or C"."""
    small = letters.lower()
    opening = r"[*_$(\[ \t]{0,4}(?:\\(?:text|textbf|mathrm|mathbf|boxed)\{)?"
    # a small letter may be an article, a capital before an apostrophe is "I'm"
    letter = rf"(?P<letter>[{letters}](?![\w'’])|[{small}](?=[)\]}}.*]|[ \t]*$))"
    also = rf"[)\]}}*_. \t]{{0,6}}(?:or|and|&|/|,)\s{{0,3}}[(\[*]{{0,2}}[{letters}](?=[)\].,*]|\s*(?:$|or\b|and\b|,))"
    stem = r"\b(?i:answer|choice|option)[*_ \t]{0,4}(?:(?i:\bis\b)|[:=：])[*_ \t]{0,4}[:：]?[*_ \t]{0,4}"
    same_line = rf"(?i:option\s|choice\s)?{opening}{letter}"
    below = rf"\s{{1,4}}[(*]{{0,3}}(?P<below>[{letters}])(?=[)\].*]|[ \t]*$)"
    found = list(re.finditer(rf"{stem}(?:{same_line}|{below})(?P<also>{also})?", text, re.MULTILINE))
    if not found:
        return ""
    return (found[-1]["letter"] or found[-1]["below"]).upper() + (found[-1]["also"] or "")


def _bare(text: str, letters: str, choices: Sequence[str]) -> str | None:
    text = text.strip()
    wrapped = _WRAPPING.match(text)
    text = (wrapped[1] if wrapped else text).strip("*_$ \t\n")
    alone = text.strip("()[].:*_ ").upper()
    if len(alone) == 1 and alone in letters:
        return alone
    plain = [" ".join(choice.casefold().split()) for choice in choices]
    if (said := " ".join(text.casefold().split())) in plain:
        return letters[plain.index(said)]
    marked = set(re.findall(rf"(?<![\w'’])[(\[*]{{0,2}}([{letters}])[)\].:*](?!\w)", text))
    return marked.pop() if len(marked) == 1 else None


def right_letter(trajectory: Trajectory, field: str, letters: str, choices: Sequence[str], reward: str) -> str:
    """The letter that `info[field]` states as a letter, as an index from 0 or as one of `choices`."""
    value = reference(trajectory, field)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(letters):
        return letters[value]
    if isinstance(value, str):
        letter = value.strip("()[].* \n").upper()
        if len(letter) == 1 and letter in letters:
            return letter
        if value in choices:
            return letters[list(choices).index(value)]
    raise RewardError(
        f"{reward}: info[{field!r}] is {value!r:.100}; it must be a letter of {letters}, an index from 0 below "
        f"{len(letters)}, or one of the choices"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MultipleChoice:
    """Compares the letter that the last action settles on with `info[field]`.

    That is a letter, an index from 0, or the text of one of `info[choices]`; a text that settles on two letters is
    wrong. `letters` counts where the env leaves no choices. `strict` wants "the answer is B", a box or a tag.
    """

    field: str = "answer"
    choices: str = "choices"
    letters: str = "ABCDE"
    strict: bool = False

    def __post_init__(self) -> None:
        if not self.letters or not ALPHABET.startswith(self.letters):
            raise RewardError(f"multiple_choice: letters is {self.letters!r}; it must be the start of {ALPHABET}")

    def __call__(self, trajectory: Trajectory, /) -> float:
        choices = choices_of(trajectory, self.choices, "multiple_choice")
        letters = ALPHABET[: len(choices)] if choices else self.letters
        right = right_letter(trajectory, self.field, letters, choices, "multiple_choice")
        return float(chosen_letter(answer_text(trajectory), letters, choices, strict=self.strict) == right)


def choices_of(trajectory: Trajectory, field: str, reward: str) -> list[str]:
    """The texts in `info[field]`, none when it is not there."""
    value: Any = trajectory.info.get(field)
    if value is None:
        return []
    if not isinstance(value, (list, tuple)) or not 0 < len(value) <= len(ALPHABET):
        raise RewardError(f"{reward}: info[{field!r}] is {value!r:.100}; it must be a list of 1 to 26 choices")
    return [str(item) for item in value]
