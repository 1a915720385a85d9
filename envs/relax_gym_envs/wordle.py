"""Find a five-letter word from letter-by-letter feedback."""

from __future__ import annotations

import random
import re
from collections import Counter
from typing import Any

from relax_gym import Env, Message, StepResult, user
from relax_gym_envs._text import check_range

_WORDS = """
slate about above actor acute adopt after again agent agree ahead alarm album alert alike alive allow alone along
alter angel anger angle apple apply arena argue arise array aside asset audio avoid award aware badly baker basic
beach begin being below bench birth black blame blind block blood board boost bound brain brand bread break breed
brief bring broad brown build buyer cable carry catch cause chain chair chart chase cheap check chest chief child
civil claim class clean clear click clock close coach coast could count court cover craft crash cream crime cross
crowd crown curve cycle daily dance death delay depth doubt dozen draft drama dream dress drink drive early earth
eight elite empty enemy enjoy enter entry equal error event every exact exist extra faith false fault fiber field
fifth fight final first flash fleet floor focus force forth forum found frame fresh front fruit fully funny giant
given glass globe grace grade grand grant grass great green group guard guess guest guide happy heart heavy hello
horse hotel house human ideal image index inner input issue joint judge knife known label large laser later laugh
layer learn least leave level light limit local logic loose lucky lunch magic major maker march match maybe mayor
"""
WORDS = tuple(_WORDS.split())


def feedback(guess: str, target: str) -> str:
    """One mark a letter: G right place, Y elsewhere in the word, . absent. A letter is marked as often as it occurs."""
    marks = ["G" if g == t else "." for g, t in zip(guess, target, strict=True)]
    left = Counter(t for t, mark in zip(target, marks, strict=True) if mark != "G")
    for index, letter in enumerate(guess):
        if marks[index] == "." and left[letter] > 0:
            marks[index] = "Y"
            left[letter] -= 1
    return "".join(marks)


class Wordle(Env):
    """Guess the secret word of five letters.

    Args:
        max_guesses: turns the agent has. A reply that is not five letters costs one, and the env says so.

    The right word gives 1 and ends the episode; running out of guesses gives 0.
    """

    def __init__(self, max_guesses: int = 6) -> None:
        check_range("max_guesses", max_guesses, 1, 10**6)
        self.max_guesses = max_guesses

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        """Choose the secret word and explain the marks."""
        super().reset(seed=seed)
        self.target = self.rng.choice(WORDS)
        self.action_rng = random.Random(self.rng.getrandbits(64))
        self.history: list[tuple[str, str]] = []
        self.left = self.max_guesses
        return user(
            f"Guess my five-letter word in {self.max_guesses} tries. Reply with one word. I mark each letter: "
            "G right place, Y in the word elsewhere, . not in the word."
        ), {}

    def step(self, action: str) -> StepResult:
        """Take one word."""
        self.left -= 1
        guess = action.strip().strip(".!\"'").lower()
        if guess == self.target:
            return StepResult(user("Correct!"), 1.0, True, False, {"correct": True})
        if re.fullmatch("[a-z]{5}", guess):
            marks = feedback(guess, self.target)
            self.history.append((guess, marks))
            text = f"{' '.join(guess)}\n{' '.join(marks)}"
        else:
            text = "That is not a word of five letters."
        if self.left <= 0:
            return StepResult(user(f"{text}\nThe word was {self.target}."), 0.0, True, False, {"correct": False})
        return StepResult(user(f"{text}\nTries left: {self.left}"), 0.0, False, False, {})

    def expert_action(self) -> str:
        """The first word of the list that fits every mark so far."""
        return next(w for w in WORDS if all(feedback(guess, w) == marks for guess, marks in self.history))

    def random_action(self) -> str:
        """Any word of the list."""
        return self.action_rng.choice(WORDS)
