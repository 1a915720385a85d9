"""Token losses → one number. The denominators are those of the global batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from relax_gym.algorithm import Aggregation, FloatArray


def token_weights(
    token_counts: Sequence[int] | NDArray[np.int64],
    aggregation: Aggregation,
    *,
    total_tokens: int,
    total_samples: int,
    norm: float | None = None,
) -> FloatArray:
    """Weight w_i of each token of sample i, [S] → [S] float64: loss = Σ_i w_i Σ_t L_{i,t}, over all micro-batches.

    `token_counts` [S], T_i, are the trained tokens of the samples at hand; `total_tokens` and `total_samples` (those
    with a trained token) are of the whole global batch, so that the gradient does not depend on how the batch is cut.

    - `token-mean`: w_i = 1 / total_tokens (DAPO: Yu et al. 2025, arXiv:2503.14476)
    - `seq-mean-token-mean`: w_i = 1 / (total_samples · T_i) (GRPO: Shao et al. 2024, arXiv:2402.03300)
    - `seq-mean-token-sum-norm`: w_i = 1 / (total_samples · norm), norm constant (Dr. GRPO: Liu et al. 2025,
      arXiv:2503.20783)
    """
    counts = np.asarray(token_counts, dtype=np.float64)
    if aggregation == "token-mean":
        return np.full_like(counts, 1 / total_tokens)
    if aggregation == "seq-mean-token-mean":
        return 1 / (total_samples * np.maximum(counts, 1))
    if norm is None:
        raise ValueError("aggregation 'seq-mean-token-sum-norm' needs norm, e.g. the longest completion in tokens")
    return np.full_like(counts, 1 / (total_samples * norm))
