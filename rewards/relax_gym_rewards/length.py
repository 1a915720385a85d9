"""Overlong answers are worse."""

from __future__ import annotations

from dataclasses import dataclass

from relax_gym.types import Trajectory
from relax_gym_rewards._answers import choice_option, number_option

HUGE = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13) of what the model wrote.

    0 up to `max_length - buffer`, falling in a line to `-penalty` at `max_length`, and `-penalty` beyond. `unit` is
    "tokens" (sampled ones) or "characters"; `over` the "episode", or the longest "turn".
    """

    max_length: int
    buffer: int = 0
    penalty: float = 1.0
    unit: str = "tokens"
    over: str = "episode"

    def __post_init__(self) -> None:
        number_option("length", "max_length", self.max_length, 1, HUGE, integer=True)
        number_option("length", "buffer", self.buffer, 0, self.max_length, integer=True)
        number_option("length", "penalty", self.penalty, 0, HUGE)
        choice_option("length", "unit", self.unit, ("tokens", "characters"))
        choice_option("length", "over", self.over, ("episode", "turn"))

    def __call__(self, trajectory: Trajectory, /) -> float:
        tokens = self.unit == "tokens"
        lengths = [len(turn.completion.token_ids) if tokens else len(turn.text) for turn in trajectory.turns]
        length = sum(lengths) if self.over == "episode" else max(lengths, default=0)
        excess = length - (self.max_length - self.buffer)
        if excess <= 0:
            return 0.0
        return -self.penalty * min(1.0, excess / self.buffer if self.buffer else 1.0)
