"""What the question envs over media share: asking, reading replies, and showing the media of another question."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from relax_gym import Env, Message, StepResult, user
from relax_gym.errors import ConfigError
from relax_gym_envs._text import check_choice, check_range

Part = dict[str, Any]
Drawn = TypeVar("Drawn")
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question in a sentence and in a word, the right answer, and all answers there are."""

    text: str
    terse: str
    answer: str
    options: tuple[str, ...]


def option_named(text: str, options: Sequence[str]) -> str | None:
    """The option that a text names last, in any case, or None. A digit may be written as a word."""
    said = {word: option for option in options for word in _spellings(option)}
    found = re.findall(rf"(?<![\w.-])(?:{'|'.join(map(re.escape, said))})(?!\w|\.\d)", text.lower())
    return said[found[-1]] if found else None


def _spellings(option: str) -> tuple[str, ...]:
    return (option, NUMBERS[int(option)]) if option.isdecimal() and int(option) < len(NUMBERS) else (option,)


def check_kinds(name: str, given: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """`given` as a tuple. Raises ConfigError unless it is a list of at least one of `known`."""
    if isinstance(given, str) or not given:
        raise ConfigError(f"{name} is {given!r}; it must be a list of at least one of {', '.join(known)}")
    for kind in given:
        check_choice(name, kind, known)
    return tuple(given)


class Quiz(Env):
    """`turns` questions, each with its media. Write `_ask`; a right answer gives 1 / `turns`."""

    question: Question

    def __init__(self, turns: int, style: str, shuffle_media: bool) -> None:
        check_range("turns", turns, 1, 1000)
        check_choice("style", style, ("plain", "terse"))
        self.turns, self.style, self.shuffle_media = turns, style, shuffle_media

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        """Ask the first question."""
        super().reset(seed=seed)
        self.action_rng = random.Random(self.rng.getrandbits(64))
        self.asked, self.solved = 0, 0
        return self._observation(), {}

    def step(self, action: str) -> StepResult:
        """Take an answer and ask the next question."""
        return self._take(action)

    def _take(self, text: str) -> StepResult:
        terse, correct = self.style == "terse", self._right(text)
        self.asked += 1
        self.solved += correct
        verdict = "" if terse else "Correct." if correct else f"Wrong. The answer is {self.question.answer}."
        if self.asked < self.turns:
            return StepResult(self._observation(verdict), correct / self.turns, False, False, {})
        info = {"correct": self.solved == self.turns}
        return StepResult(user(verdict) if verdict else [], correct / self.turns, True, False, info)

    def _right(self, text: str) -> bool:
        """Whether a reply is the right answer."""
        given = text if self.style == "terse" else option_named(text, self.question.options)
        return given == self.question.answer

    def _observation(self, verdict: str = "") -> list[Message]:
        media, self.question = self._ask()
        asked = f"{self.question.text} Reply with one of: {', '.join(self.question.options)}."
        text = {"type": "text", "text": self.question.terse if self.style == "terse" else asked}
        return user([*([{"type": "text", "text": f"{verdict}\n"}] if verdict else []), *media, text])

    def _ask(self) -> tuple[list[Part], Question]:
        raise NotImplementedError

    def _shown(self, truth: Drawn, draw: Callable[[random.Random], Drawn]) -> Drawn:
        """What the media show: the truth or, with `shuffle_media`, what another seed would have drawn."""
        other = random.Random(self.rng.getrandbits(64))  # drawn either way: both ask the same questions
        return draw(other) if self.shuffle_media else truth

    def expert_action(self) -> str:
        """The right answer."""
        return self.question.answer

    def random_action(self) -> str:
        """Any of the answers."""
        return self.action_rng.choice(self.question.options)
