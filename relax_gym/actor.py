"""Lets an env play itself: what its expert or its legal actions say takes the place of a model's answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from relax_gym.sampler import SamplingParams, Session
from relax_gym.types import Completion, FinishReason, Placed

if TYPE_CHECKING:
    from relax_gym.chat import ChatRenderer


class Actor(Session):
    """Answers with what `act` says, whole, as the ids a policy would sample; log-probs and versions are 0.

    `act` asks the env through its driver, so that a fault of it is the env's: `lambda: driver.act("expert_action")`.
    """

    def __init__(self, act: Callable[[], Awaitable[str]], renderer: ChatRenderer) -> None:
        self._act = act
        self._renderer = renderer

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, media: Sequence[Placed] = ()
    ) -> Completion:
        """The answer, however long."""
        ids = self._renderer.encode_answer(await self._act(), prompt_ids)
        return Completion(
            token_ids=ids, logprobs=(0.0,) * len(ids), versions=(0,) * len(ids), finish_reason=FinishReason.STOP
        )

    def close(self) -> None:
        """Nothing to free."""
