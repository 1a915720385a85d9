"""Rewards → advantages, in float64. NaN marks what could not be scored: it is in no statistic and gets 0."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from relax_gym.algorithm import FloatArray


def group_normalise(rewards: FloatArray, *, scale: Literal["std", "none"] = "std", eps: float = 1e-6) -> FloatArray:
    """(R − mean) / (std + eps) over one group, [G] → [G], in float64; std is the unbiased one (n − 1).

    `scale="none"` gives R − mean. A group with fewer than two scored episodes, or whose scores are all equal, gives
    exactly 0.

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


def leave_one_out(rewards: FloatArray) -> FloatArray:
    """R_i minus the mean of the others' rewards, which is n/(n − 1) · (R_i − mean) for n scored episodes, [G] → [G].

    A group with fewer than two scored episodes, or whose scores are all equal, gives exactly 0.

    RLOO: Ahmadian et al. 2024 (arXiv:2402.14740).
    """
    scored = int((~np.isnan(rewards)).sum())
    return group_normalise(rewards, scale="none") * (scored / max(scored - 1, 1))


def whiten(values: FloatArray, *, eps: float = 1e-9) -> FloatArray:
    """(x − mean) / (std + eps) over all values, [N] → [N]; std is the unbiased one (n − 1), in two passes.

    Fewer than two values, or equal ones, give exactly 0. Statistics of the whole batch, so they have to be taken before
    it is spread over ranks or micro-batches.

    REINFORCE++: Hu et al. 2025 (arXiv:2501.03262).
    """
    values = np.asarray(values, dtype=np.float64)
    if len(values) < 2 or (values == values[0]).all():
        return np.zeros_like(values)
    centred: FloatArray = values - values.mean()
    return centred / (float(np.sqrt(np.square(centred).sum() / (len(values) - 1))) + eps)


def overlong_penalty(lengths: NDArray[np.int64], *, start: int, end: int) -> FloatArray:
    """0 up to `start` tokens, then falling linearly to −1 at `end` and staying there, [G] → [G].

    Soft overlong punishment of DAPO (Yu et al. 2025, arXiv:2503.14476), where `end` is L_max and `start` is
    L_max − L_cache.
    """
    return -np.clip((np.asarray(lengths, dtype=np.float64) - start) / (end - start), 0.0, 1.0)
