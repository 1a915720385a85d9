"""Guess a number; after every wrong guess the env says whether it is higher or lower."""

from __future__ import annotations

import random
import re
from typing import Any

from relax_gym import Env, Message, StepResult, user
from relax_gym_envs._text import check_choice, check_range


class GuessNumber(Env):
    """Find a secret integer in [low, high] within `max_guesses` turns.

    Args:
        low, high: bounds of the secret, both included, at least 0.
        max_guesses: turns the agent has.
        style: "plain" speaks in sentences and forgives spaces and a full stop; "terse" says `guess 1-10`, then `higher`
            or `lower`, and takes digits only.
        invalid_reward: reward of a reply that is no number; it ends the episode.

    A right guess gives 1 and ends the episode, running out of guesses gives 0.
    """

    def __init__(
        self, low: int = 1, high: int = 10, max_guesses: int = 4, style: str = "plain", invalid_reward: float = -0.2
    ) -> None:
        check_choice("style", style, ("plain", "terse"))
        check_range("high", high, 1, 10**9)
        check_range("low", low, 0, high - 1)
        check_range("max_guesses", max_guesses, 1, 10**6)
        check_range("invalid_reward", invalid_reward, -1e6, 1e6)
        self.low, self.high, self.max_guesses = low, high, max_guesses
        self.style, self.invalid_reward = style, float(invalid_reward)
        self.pattern = rf"[0-9]{{1,{max(2, len(str(high)))}}}"

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        """Choose the secret and ask for the first guess."""
        super().reset(seed=seed)
        self.secret = self.rng.randint(self.low, self.high)
        self.action_rng = random.Random(self.rng.getrandbits(64))
        self.first, self.last, self.guesses = self.low, self.high, 0
        if self.style == "terse":
            return user(f"guess {self.low}-{self.high}"), {}
        return user(
            f"I am thinking of a number from {self.low} to {self.high}. Guess it. "
            f"You have {self.max_guesses} guesses. Reply with only a number."
        ), {}

    def step(self, action: str) -> StepResult:
        """Take one guess."""
        self.guesses += 1
        text = action if self.style == "terse" else action.strip().removesuffix(".")
        if not re.fullmatch(self.pattern, text):
            return self._end("That is not a number.", self.invalid_reward)
        guess = int(text)
        if guess == self.secret:
            return self._end("Correct!", 1.0)
        if self.guesses >= self.max_guesses:
            return self._end(f"Out of guesses. It was {self.secret}.", 0.0)
        if guess < self.secret:
            self.first = max(self.first, guess + 1)
        else:
            self.last = min(self.last, guess - 1)
        hint = "higher" if guess < self.secret else "lower"
        return StepResult(user(hint if self.style == "terse" else f"{hint.capitalize()}."), 0.0, False, False, {})

    def _end(self, text: str, reward: float) -> StepResult:
        return StepResult([] if self.style == "terse" else user(text), reward, True, False, {"correct": reward == 1.0})

    def expert_action(self) -> str:
        """The middle of what is still possible."""
        return str((self.first + self.last) // 2)

    def random_action(self) -> str:
        """Any number in [low, high]."""
        return str(self.action_rng.randint(self.low, self.high))
