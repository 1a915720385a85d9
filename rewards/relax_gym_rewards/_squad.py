"""SQuAD's way to compare short answers (arXiv 1606.05250): no case, punctuation, articles or extra spaces."""

from __future__ import annotations

import re
import string
from collections import Counter

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def compared(given: str, expected: str) -> tuple[list[str], list[str]]:
    """The words of an answer and a reference that count: articles and punctuation do if a reference is nothing else."""
    normalise = next((rule for rule in (_words, _with_articles, _with_punctuation) if rule(expected)), _words)
    return normalise(given), normalise(expected)


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def _with_articles(text: str) -> list[str]:
    return text.lower().translate(_NO_PUNCTUATION).split()


def _with_punctuation(text: str) -> list[str]:
    return text.lower().split()


def overlap_f1(given: list[str], expected: list[str]) -> float:
    """Harmonic mean of precision and recall of words, each as often as it stands there. Of nothing it is equality."""
    if not given or not expected:
        return float(given == expected)
    common = sum((Counter(given) & Counter(expected)).values())
    return 2 * common / (len(given) + len(expected))
