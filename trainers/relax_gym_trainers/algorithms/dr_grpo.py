"""Dr. GRPO: GRPO without its two biases, towards short right answers and towards easy or hard tasks."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from relax_gym.algorithm import Aggregation
from relax_gym_trainers.algorithms.grpo import GRPO


class DrGRPO(GRPO):
    """GRPO done right (Liu et al. 2025, arXiv:2503.20783).

    A_i = R_i − mean R; GRPO's loss; Σ over tokens / token_sum_norm, mean over samples. The constant is the longest
    completion in the paper; it scales the gradient and nothing else.
    """

    aggregation: Aggregation = "seq-mean-token-sum-norm"
    scale: Literal["std", "none"] = Field("none", description="divide by the group's standard deviation, or do not")

    @model_validator(mode="before")
    @classmethod
    def _needs_norm(cls, data: Any) -> Any:
        if isinstance(data, dict) and not {"token_sum_norm", "aggregation"} & data.keys():
            raise ValueError(
                "dr_grpo divides each sample's sum by a constant: give token_sum_norm, usually the most tokens an "
                "episode may sample (rollout.max_turns * rollout.max_new_tokens)"
            )
        return data
