"""Pure functions that algorithms are made of. No torch import, no config, no device, no process group.

Masked tokens never reach these functions: the learner selects the trained tokens first (see `TrainedTokens`), so a NaN
at a masked position has no way in. ℓ is a log-prob at the sampling temperature, A an advantage, r = exp(ℓ − ℓ_old).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

    from relax_gym.algorithm import FloatArray

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KLEstimator = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0
"""Beyond this |Δ| exp(−Δ) says nothing more and only risks an overflow, whose gradient would be NaN."""

MAX_K3 = 10.0
"""One token's k3 is cut here: it grows exponentially where π fell far below π_ref."""


def group_normalise(rewards: FloatArray, *, scale: Literal["std", "none"] = "std", eps: float = 1e-6) -> FloatArray:
    """(R − mean) / (std + eps) over one group, [G] → [G], in float64; std is the unbiased one (n − 1).

    `scale="none"` gives R − mean. NaN marks an episode that could not be scored: it is in no statistic and gets 0.
    A group with fewer than two scored episodes, or whose scores are all equal, gives exactly 0.

    GRPO: Shao et al. 2024 (arXiv:2402.03300). Without the division: Dr. GRPO, Liu et al. 2025 (arXiv:2503.20783).
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    out = np.zeros_like(rewards)
    scored = ~np.isnan(rewards)
    values = rewards[scored]
    # The mean of equal floats need not be exactly that float, so equality is asked of the values themselves.
    if len(values) < 2 or (values == values[0]).all():
        return out
    centred = values - values.mean()
    out[scored] = centred if scale == "none" else centred / (values.std(ddof=1) + eps)
    return out


def ppo_clip_loss(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Tensor:
    """max(−rA, −clip(r, 1 − clip_low, 1 + clip_high)A) for each token, [N] → [N].

    With `dual_clip` = c > 1, where A < 0 the loss is at most −cA, so a token whose ratio ran away cannot dominate.

    PPO: Schulman et al. 2017 (arXiv:1707.06347). Two clip sides: DAPO, Yu et al. 2025 (arXiv:2503.14476). Dual clip:
    Ye et al. 2020 (arXiv:1912.09729).
    """
    loss = (-ratio * advantages).maximum(-ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip is None:
        return loss
    return loss.minimum(-dual_clip * advantages).where(advantages < 0, loss)


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


def token_weights(
    token_counts: Sequence[int] | NDArray[np.int64],
    aggregation: Aggregation,
    *,
    total_tokens: int,
    total_samples: int,
    norm: float | None = None,
) -> FloatArray:
    """Weight w_i of each token of each sample, [S]: loss = Σ_i w_i Σ_t L_{i,t}, summed over all micro-batches.

    `token_counts` [S] are the trained tokens of the samples at hand; `total_tokens` and `total_samples` (those with a
    trained token) are of the whole global batch, which is why the gradient does not depend on how the batch is cut.

    - `token-mean`: 1 / total_tokens
    - `seq-mean-token-mean`: 1 / (total_samples · T_i)
    - `seq-mean-token-sum-norm`: 1 / (total_samples · norm), norm a constant (Dr. GRPO, arXiv:2503.20783)
    """
    counts = np.asarray(token_counts, dtype=np.float64)
    if aggregation == "token-mean":
        return np.full_like(counts, 1 / total_tokens)
    if aggregation == "seq-mean-token-mean":
        return 1 / (total_samples * np.maximum(counts, 1))
    if norm is None:
        raise ValueError("aggregation 'seq-mean-token-sum-norm' needs norm, e.g. the longest completion in tokens")
    return np.full_like(counts, 1 / (total_samples * norm))
