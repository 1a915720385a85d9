"""Arithmetic word problems made on the spot, in six levels."""

from __future__ import annotations

import random
from decimal import Decimal
from typing import Any

from relax_gym import Env, Message, StepResult, user
from relax_gym_envs._text import check_choice, check_range, last_number
from relax_gym_envs._word_problem_templates import LEVELS

FORMATS = {
    "number": ("Reply with only the number.", "{}"),
    "answer": ("Think, then end with 'Answer: ' and the number.", "Answer: {}"),
    "boxed": ("Think, then put the number in \\boxed{}.", "\\boxed{{{}}}"),
}


class WordProblems(Env):
    """One word problem; a wrong answer may be retried.

    Args:
        level: 1 sums, 2 products, 3 two steps, 4 percentages and averages, 5 three steps, 6 rates in three steps.
        answer_format: how the answer is asked for: "number", "answer" or "boxed". The last number of the reply counts.
        retries: how often a wrong answer may be replaced.

    A right answer gives 1 at once and 0.5 after a retry; otherwise 0.
    """

    def __init__(self, level: int = 1, answer_format: str = "number", retries: int = 1) -> None:
        check_range("level", level, 1, len(LEVELS))
        check_choice("answer_format", answer_format, tuple(FORMATS))
        check_range("retries", retries, 0, 100)
        self.level, self.answer_format, self.retries = level, answer_format, retries

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        """Draw a template and its numbers."""
        super().reset(seed=seed)
        text, answer = self.rng.choice(LEVELS[self.level - 1])
        a, b, c = self.rng.randint(2, 19), self.rng.randint(2, 12), self.rng.randint(2, 50)
        n, m = self.rng.sample(["Ann", "Tom", "Sue", "Max", "Eva", "Ben"], 2)
        t = self.rng.choice(["apples", "books", "coins", "pens", "cards"])
        self.answer, self.tries = Decimal(f"{answer(a, b, c):g}"), 0
        self.action_rng = random.Random(self.rng.getrandbits(64))
        problem = text.format(a=a, b=b, c=c, ab=a * b, a20=20 * a, b5=5 * b, n=n, m=m, t=t)
        return user(f"{problem} {FORMATS[self.answer_format][0]}"), {}

    def step(self, action: str) -> StepResult:
        """Take an answer."""
        self.tries += 1
        given = last_number(action)
        if given == self.answer:
            return StepResult(user("Correct."), 1.0 if self.tries == 1 else 0.5, True, False, {"correct": True})
        if self.tries > self.retries:
            return StepResult(user(f"Wrong. It is {self.answer}."), 0.0, True, False, {"correct": False})
        wrong = "I found no number in your reply." if given is None else "That is not right."
        return StepResult(user(f"{wrong} Try again."), 0.0, False, False, {})

    def expert_action(self) -> str:
        """The right answer."""
        return FORMATS[self.answer_format][1].format(self.answer)

    def random_action(self) -> str:
        """Any number from 0 to 100."""
        return FORMATS[self.answer_format][1].format(self.action_rng.randint(0, 100))
