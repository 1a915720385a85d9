"""Estimates of the KL divergence to a reference from the sampled token alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from relax_gym.algorithm import MAX_LOG_RATIO

if TYPE_CHECKING:
    from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3"]

MAX_K3 = 10.0
"""One token's k3 is cut here: it grows exponentially where π fell far below π_ref."""


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate of KL(π‖π_ref) from one sampled token each, [N] → [N]. Δ = ℓ − ℓ_ref.

    k1 = Δ, k2 = Δ²/2, k3 = exp(−Δ) − 1 + Δ, at most 10. The gradient of k1 does not depend on ℓ_ref, so k1 may shape a
    reward but is no loss.

    Schulman 2020, "Approximating KL divergence".
    """
    delta = logprobs - ref_logprobs
    if estimator == "k1":
        return delta
    if estimator == "k2":
        return delta.square() / 2
    delta = delta.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return ((-delta).expm1() + delta).clamp(max=MAX_K3)
