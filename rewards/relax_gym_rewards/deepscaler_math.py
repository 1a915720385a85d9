"""DeepScaleR's verifier of mathematics: 1 when the box after the thinking holds the reference, else 0."""

from __future__ import annotations

from relax_gym.types import Trajectory
from relax_gym_rewards._answers import boxed, references, spoken
from relax_gym_rewards._episode import final_action
from relax_gym_rewards._latex import plain_latex
from relax_gym_rewards.math import Math, Verdict

END_OF_THINKING = "</think>"


class DeepScaleRMath(Math):
    r"""1 when the last `\boxed{…}` after `</think>` equals `info[field]`, or any item when that is a list, else 0.

    Equal is written alike (dollars, units, `\dfrac12` … rewritten), else mathematically, as `math` finds it. Without
    `thinking` the text needs no `</think>`. A reference may itself stand in a box.
    """

    name = "deepscaler_math"

    def __init__(self, *, field: str = "answer", thinking: bool = True, timeout: float = 5.0, workers: int = 2) -> None:
        super().__init__(field=field, timeout=timeout, workers=workers)
        self.thinking = thinking

    async def __call__(self, trajectory: Trajectory, /) -> float:
        allowed = references(trajectory, self.field, self.name)
        action = final_action(trajectory)
        ended = END_OF_THINKING in trajectory.turns[-1].text or not self.thinking
        given = boxed(spoken(action)) if ended else None
        return 0.0 if not given else await self.equal_to_any(given, allowed)

    async def equal_to_any(self, given: str, allowed: list[str]) -> float:
        """1 when `given` is written as one of the references or equal to one, else 0."""
        bare = [boxed(item) or item for item in allowed]
        if plain_latex(given) in [plain_latex(item) for item in bare]:
            return 1.0
        verdicts = [await self.verdict(f"\\boxed{{{given}}}", item) for item in bare]
        return float(Verdict.EQUAL in verdicts)  # a reference in words has been compared as text above
