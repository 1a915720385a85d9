"""How well two scorings of the same episodes agree. Pure functions."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

Scores = Sequence[float | None]
"""One for each episode, None where it could not be scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Of the `episodes` that both scored. `correlation` (Pearson's r) and `kappa` are None where they are undefined.

    `accuracy` is the share on the same side of the threshold, `kappa` Cohen's, of the two sides; `mean_difference` is
    the mean of first less second.
    """

    episodes: int
    mean_difference: float | None
    correlation: float | None
    accuracy: float | None
    kappa: float | None


def agreement(first: Scores, second: Scores, *, threshold: float = 0.5) -> Agreement:
    """Compare two scorings; a score of at least `threshold` is a pass. Raises ValueError for unequal lengths."""
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if a is not None and b is not None]
    if not pairs:
        return Agreement(episodes=0, mean_difference=None, correlation=None, accuracy=None, kappa=None)
    ours, theirs = [a for a, _ in pairs], [b for _, b in pairs]
    sides = [(a >= threshold, b >= threshold) for a, b in pairs]
    return Agreement(
        episodes=len(pairs),
        mean_difference=statistics.fmean(a - b for a, b in pairs),
        correlation=correlation(ours, theirs),
        accuracy=statistics.fmean(a == b for a, b in sides),
        kappa=cohen_kappa([a for a, _ in sides], [b for _, b in sides]),
    )


def correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Pearson's r; None when one of them is constant."""
    if len(first) < 2 or len({*first}) == 1 or len({*second}) == 1:
        return None
    return statistics.correlation(first, second)


def cohen_kappa(first: Sequence[Hashable], second: Sequence[Hashable]) -> float | None:
    """(p_o − p_e) / (1 − p_e) of two raters' categories; None when both always say the same one.

    Cohen 1960, A coefficient of agreement for nominal scales.
    """
    count = len(first)
    if not count:
        return None
    ours, theirs = Counter(first), Counter(second)
    observed = sum(a == b for a, b in zip(first, second, strict=True)) / count
    expected = math.fsum(ours[name] * theirs[name] for name in ours) / count**2
    return None if expected == 1 else (observed - expected) / (1 - expected)
