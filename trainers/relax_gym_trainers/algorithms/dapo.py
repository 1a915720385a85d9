"""DAPO: GRPO with a higher clip, token mean, groups without contrast replaced, and overlong answers punished softly."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from relax_gym.algorithm import Aggregation, FloatArray
from relax_gym.errors import ConfigError
from relax_gym.types import Group
from relax_gym_trainers.algorithms.grpo import GRPO
from relax_gym_trainers.functional import overlong_penalty

if TYPE_CHECKING:
    from relax_gym.config import RunConfig


class DAPO(GRPO):
    """Decoupled clip and dynamic sampling (Yu et al. 2025, arXiv:2503.14476).

    GRPO's advantages and loss with ε 0.2 / 0.28, mean over all tokens; groups whose raw rewards are all equal are
    replaced; the reward of an episode of n sampled tokens falls by clip((n − start) / (end − start), 0, 1).
    """

    aggregation: Aggregation = "token-mean"
    clip_high: float = Field(0.28, gt=0, description="the ratio is not pushed above 1 + clip_high")
    filter_zero_variance: bool = True
    overlong_range: tuple[int, int] | None = Field(
        None, description="[start, end]: tokens sampled in an episode at which its reward begins to fall, and is 1 less"
    )

    def check_run(self, config: RunConfig) -> None:
        """An episode must be able to become overlong."""
        super().check_run(config)
        start, end = self.overlong_range or (0, 1)
        longest = config.rollout.max_turns * config.rollout.max_new_tokens
        if not 0 <= start < min(end, longest):
            raise ConfigError(
                f"algorithm.overlong_range = [{start}, {end}] punishes nothing: start must be below end and below "
                f"{longest}, the most tokens an episode samples (rollout.max_turns * rollout.max_new_tokens)"
            )

    def shaped_rewards(self, group: Group) -> FloatArray:
        """Raw rewards less the overlong penalty, [G]."""
        if self.overlong_range is None:
            return group.rewards
        lengths = np.array([sum(len(turn.completion.token_ids) for turn in t.turns) for t in group.trajectories])
        start, end = self.overlong_range
        return group.rewards + overlong_penalty(lengths, start=start, end=end)
