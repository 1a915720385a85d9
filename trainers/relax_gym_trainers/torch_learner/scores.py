"""Numbers of tokens that do not depend on the rest of their batch: computed by group, maybe before it is there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_gym.types import TrainingSample

Name = tuple[str, int]
Found = dict[Name, NDArray[Any]]
Values = dict[TrainingSample, NDArray[Any]]
"""For each sample that has trained tokens an array [trained_tokens]."""
Compute = Callable[[Sequence[Sequence[TrainingSample]]], Sequence[Values]]
"""The samples of some groups → the values of each group, which must not depend on the other groups."""


class GroupScores:
    """What `compute` says of each sample, until `forget`. A group's samples are always computed by themselves: whether
    that was before the step or in it makes no difference to a single bit.
    """

    def __init__(self, compute: Compute) -> None:
        self._compute = compute
        self._known: dict[tuple[Name, ...], Found] = {}

    def of(self, samples: Sequence[TrainingSample]) -> Found:
        """By `name_of` of the sample, for whole groups; what is known already is not computed."""
        groups = {tuple(map(name_of, group)): group for group in by_group(samples)}
        missing = [names for names in groups if names not in self._known]
        computed = self._compute([groups[names] for names in missing]) if missing else []
        for names, values in zip(missing, computed, strict=True):
            self._known[names] = {name_of(sample): value for sample, value in values.items()}
        return {name: value for names in groups for name, value in self._known[names].items()}

    def forget(self) -> None:
        """What was computed is not asked for again, or not valid any more."""
        self._known.clear()


def name_of(sample: TrainingSample) -> Name:
    """What names a sample, whatever its advantages."""
    return sample.episode_id, sample.segment


def by_group(samples: Iterable[TrainingSample]) -> list[list[TrainingSample]]:
    """The samples of each group, groups in order of appearance."""
    groups: dict[str, list[TrainingSample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_id, []).append(sample)
    return list(groups.values())


def joined(found: Found, members: Sequence[TrainingSample]) -> NDArray[Any]:
    """What is known of a micro-batch's samples, one after the other, [N]."""
    empty = np.zeros(0, dtype=np.float32)
    return np.concatenate([found.get(name_of(member), empty) for member in members]) if members else empty
