"""Open-R1 Multimodal's verifier: is the answer right, and is the form?"""

from __future__ import annotations

from relax_gym.types import Trajectory
from relax_gym_rewards._answers import boxed, references, spoken, tagged
from relax_gym_rewards._episode import final_action
from relax_gym_rewards.format import in_order
from relax_gym_rewards.geo3k import Geo3K


class OpenR1MM(Geo3K):
    r"""`1 - format_weight` when the last `<answer>` equals `info[field]`, and `format_weight` for the form, 0 to 1.

    The form is `<think>…</think><answer>…</answer>` and nothing else; `opened`: the chat template wrote the first tag.
    Equal is the same text but for case and spaces, or what `deepscaler_math` finds equal; a box inside is opened.
    """

    name = "openr1mm"

    def __init__(
        self,
        *,
        field: str = "answer",
        format_weight: float = 0.5,
        opened: bool = False,
        timeout: float = 5.0,
        workers: int = 2,
    ) -> None:
        super().__init__(field=field, format_weight=format_weight, opened=opened, timeout=timeout, workers=workers)

    async def __call__(self, trajectory: Trajectory, /) -> float:
        allowed = [tagged(item) or item for item in references(trajectory, self.field, self.name)]
        given = tagged(spoken(final_action(trajectory)))
        accuracy = await self._accuracy(boxed(given) or given, allowed) if given else 0.0
        form = in_order(trajectory.turns[-1].text, ("think", "answer"), opened=self.opened)
        return (1 - self.format_weight) * accuracy + self.format_weight * form

    async def _accuracy(self, given: str, allowed: list[str]) -> float:
        if _folded(given) in map(_folded, allowed):
            return 1.0
        return await self.equal_to_any(given, allowed)


def _folded(text: str) -> str:
    return " ".join(text.casefold().split())
