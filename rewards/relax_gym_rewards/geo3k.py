"""Geometry3K's verifier: is the box right, and is the form?"""

from __future__ import annotations

from relax_gym.types import Trajectory
from relax_gym_rewards._answers import boxed, number_option, references, spoken
from relax_gym_rewards._episode import final_action
from relax_gym_rewards.deepscaler_math import END_OF_THINKING, DeepScaleRMath


class Geo3K(DeepScaleRMath):
    r"""`1 - format_weight` when the last `\boxed{…}` equals `info[field]`, and `format_weight` for the form, 0 to 1.

    The form is `<think>…</think>` at the start and a box after it; `opened`: the chat template wrote the first tag. The
    box counts outside of the thinking only. Equal is what `deepscaler_math` finds equal.
    """

    name = "geo3k"

    def __init__(
        self,
        *,
        field: str = "answer",
        format_weight: float = 0.1,
        opened: bool = False,
        timeout: float = 5.0,
        workers: int = 2,
    ) -> None:
        super().__init__(field=field, thinking=False, timeout=timeout, workers=workers)
        number_option(self.name, "format_weight", format_weight, 0, 1)
        self.format_weight, self.opened = format_weight, opened

    async def __call__(self, trajectory: Trajectory, /) -> float:
        references(trajectory, self.field, self.name)
        final_action(trajectory)
        accuracy = await super().__call__(trajectory)
        text = ("<think>" if self.opened else "") + trajectory.turns[-1].text.strip()
        return (1 - self.format_weight) * accuracy + self.format_weight * self.good_form(text)

    def good_form(self, text: str) -> bool:
        """One `<think>` block at the start, and a box behind it."""
        once = text.count("<think>") == 1 == text.count(END_OF_THINKING)
        return once and text.startswith("<think>") and boxed(spoken(text)) is not None
