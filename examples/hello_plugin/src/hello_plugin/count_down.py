"""Count down to zero, one number a turn."""

from typing import Any

from relax_gym import Env, Message, StepResult, user


class CountDown(Env):
    """The env says a number, the agent the one below it, and so on down to 0. Each right number gives 1/steps.

    Args:
        highest: the first number is drawn from [2, highest]; `highest` is at most 9.
    """

    def __init__(self, highest: int = 4) -> None:
        if not 2 <= highest <= 9:
            raise ValueError(f"highest is {highest}; it must be from 2 to 9")
        self.highest = highest

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        """Draw the first number."""
        super().reset(seed=seed)
        self.start = self.number = self.rng.randint(2, self.highest)
        return user(str(self.number)), {}

    def step(self, action: str) -> StepResult:
        """Compare with the next number; a wrong one ends the episode."""
        correct = action.strip() == self.expert_action()
        self.number -= 1
        done = not correct or self.number == 0
        info = {"correct": correct and done}
        return StepResult([] if done else user("go on"), correct / self.start, done, False, info)

    def expert_action(self) -> str:
        """The next number."""
        return str(self.number - 1)

    def random_action(self) -> str:
        """Any number the episode could ask for."""
        return str(self.rng.randint(0, self.highest))
