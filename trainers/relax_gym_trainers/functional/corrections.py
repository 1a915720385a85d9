"""Weights for tokens that another policy sampled than the one the ratio is taken against. All are constants: detached.

δ = ℓ_old − ℓ_roll, the log of π_old over the policy that sampled, of each token or as a mean over its sample.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def truncated_weight(log_ratio: Tensor, *, cap: float) -> Tensor:
    """min(exp δ, cap), [N] → [N].

    TIS: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".
    """
    return log_ratio.detach().exp().clamp(max=cap)


def icepop_weight(log_ratio: Tensor, *, low: float, high: float) -> Tensor:
    """exp δ where it lies in [low, high], else 0, [N] → [N].

    IcePop: Ling Team 2025 (arXiv:2510.18855).
    """
    weight = log_ratio.detach().exp()
    return weight.where((weight >= low) & (weight <= high), 0.0)


def keeps_sequence(advantages: Tensor, drift: Tensor, *, delta: float) -> Tensor:
    """Which tokens stay: those with A ≥ 0 and those of samples whose mean `drift` = ℓ_roll − ℓ is at most δ, [N] bool.

    Off-policy sequence masking: DeepSeek-AI 2025, DeepSeek-V3.2 (arXiv:2512.02556).
    """
    return (advantages >= 0) | (drift.detach() <= delta)
