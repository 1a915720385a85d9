"""Sums too long for the head, and a calculator as a tool."""

from __future__ import annotations

import json
import random
from typing import Any

from relax_gym import Message, StepResult, user
from relax_gym.tools import ToolEnv, ToolError
from relax_gym_envs import _arithmetic
from relax_gym_envs._text import check_range, last_number


class Calculator(ToolEnv):
    """Compute an expression with the `calculate` tool, then answer in a message without a tool call.

    Args:
        operations: how many of + - * the expression has, 1 to 8.
        digits: digits of each number, 1 to 9.

    The answer ends the episode: 1 when its last number is the value of the expression, otherwise 0.
    """

    def __init__(self, operations: int = 3, digits: int = 4) -> None:
        check_range("operations", operations, 1, 8)
        check_range("digits", digits, 1, 9)
        self.operations, self.digits = operations, digits

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        """Draw an expression."""
        super().reset(seed=seed)
        self.expression = self._draw(self.rng)
        self.value = int(_arithmetic.calculate(self.expression))
        self.action_rng = random.Random(self.rng.getrandbits(64))
        self.called = False
        return user(f"What is {self.expression}? Use the calculate tool, then reply with the number."), {}

    def calculate(self, expression: str) -> str:
        """Compute an arithmetic expression.

        Args:
            expression: Numbers, + - * / // % ** and parentheses, for example (12 + 30) * 4.
        """
        try:
            result = _arithmetic.show(_arithmetic.calculate(expression))
        except ValueError as error:
            raise ToolError(str(error)) from error
        self.called = True
        return result

    def on_answer(self, text: str) -> StepResult:
        """Take the answer."""
        correct = last_number(text) == self.value
        return StepResult([], float(correct), True, False, {"correct": correct})

    def _draw(self, rng: random.Random) -> str:
        low, high = 10 ** (self.digits - 1), 10**self.digits - 1
        expression, is_sum = str(rng.randint(low, high)), False
        for _ in range(self.operations):
            sign, number = rng.choice("+-*"), rng.randint(low, high)
            if sign == "*" and is_sum:
                expression = f"({expression})"
            expression, is_sum = f"{expression} {sign} {number}", sign != "*"
        return expression

    def _call(self, expression: str) -> str:
        call = {"name": "calculate", "arguments": {"expression": expression}}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"

    def expert_action(self) -> str:
        """Call the tool with the expression, then say its value."""
        return str(self.value) if self.called else self._call(self.expression)

    def random_action(self) -> str:
        """Call the tool with another expression, or guess."""
        return self._call(self._draw(self.action_rng)) if not self.called else str(self.action_rng.randint(0, 10**6))
