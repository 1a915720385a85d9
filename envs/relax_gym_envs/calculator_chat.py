"""A word problem, a calculator called in plain chat, an answer. Shown by worked examples as earlier turns."""

from __future__ import annotations

import operator
import random
import re
from typing import Any

from relax_gym import Env, Message, StepResult, user
from relax_gym_envs._text import check_range

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
QUESTIONS = {
    "+": "{name} has {a} {things} and gets {b} more. How many {things} in total?",
    "-": "{name} has {a} {things} and loses {b}. How many {things} are left?",
    "*": "{name} has {a} boxes with {b} {things} each. How many {things} in all boxes?",
}
RULES = "Write calc(a + b), calc(a - b) or calc(a * b), then Answer: result."
EXAMPLES = ((30, "+", 14), (52, "-", 17), (12, "*", 11))


class CalculatorChat(Env):
    """Turn one: write `calc(a + b)`. The env replies with the result. Turn two: write `Answer: result`.

    Args:
        low, high: bounds of the numbers in the problem, both included, at least 0.
        shots: worked examples before the question, 0 to 3, each four chat messages, drawn at random.

    A well-formed call gives 0.05, the right one 0.5, anything else ends the episode with 0. The right answer then gives
    another 0.5. `info["correct"]` of the last step says whether the answer is right.
    """

    def __init__(self, low: int = 12, high: int = 99, shots: int = 1) -> None:
        check_range("high", high, 0, 10**9)
        check_range("low", low, 0, high)
        check_range("shots", shots, 0, len(EXAMPLES))
        self.low, self.high, self.shots = low, high, shots
        number = rf"([0-9]{{1,{max(4, len(str(high)))}}})"
        self.pattern = rf"calc\({number} ?([*+-]) ?{number}\)"

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        """Draw a problem; the observation is the examples and then the question."""
        super().reset(seed=seed)
        self.a, self.b = self.rng.randint(self.low, self.high), self.rng.randint(self.low, self.high)
        self.sign = self.rng.choice("+-*")
        things = self.rng.choice(["apples", "books", "coins", "pens", "cards"])
        name = self.rng.choice(["Ann", "Tom", "Sue", "Max"])
        self.action_rng = random.Random(self.rng.getrandbits(64))
        self.result: int | None = None
        question = QUESTIONS[self.sign].format(name=name, a=self.a, b=self.b, things=things)
        # Drawn, not fixed: a model that copies the operator of the one example it always sees explores no other.
        examples = self.rng.sample(EXAMPLES, self.shots)
        worked = [message for example in examples for message in _worked(*example)]
        return [{"role": "system", "content": RULES}, *worked, *user(question)], {}

    def step(self, action: str) -> StepResult:
        """First the call, then the answer."""
        text, truth = action.strip(), OPERATORS[self.sign](self.a, self.b)
        if self.result is not None:
            correct = text == f"Answer: {self.result}" and self.result == truth
            return StepResult([], 0.5 * correct, True, False, {"correct": correct})
        call = re.fullmatch(self.pattern, text)
        if not call:
            return StepResult([], 0.0, True, False, {"correct": False})
        a, sign, b = call.groups()
        # Numbers with a leading zero are no numbers to this calculator: it shows 0.
        self.result = 0 if "0" in (a[0], b[0]) else OPERATORS[sign](int(a), int(b))
        return StepResult(user(str(self.result)), 0.5 if self.result == truth else 0.05, False, False, {})

    def expert_action(self) -> str:
        """The right call, then its result."""
        return f"calc({self.a} {self.sign} {self.b})" if self.result is None else f"Answer: {self.result}"

    def random_action(self) -> str:
        """A well-formed call or answer with any numbers."""
        a, b = (self.action_rng.randint(self.low, self.high) for _ in range(2))
        return f"calc({a} {self.action_rng.choice('+-*')} {b})" if self.result is None else f"Answer: {a}"


def _worked(a: int, sign: str, b: int) -> list[Message]:
    result = OPERATORS[sign](a, b)
    return [
        *user(QUESTIONS[sign].format(name="Bob", a=a, b=b, things="hats")),
        {"role": "assistant", "content": f"calc({a} {sign} {b})"},
        *user(str(result)),
        {"role": "assistant", "content": f"Answer: {result}"},
    ]
