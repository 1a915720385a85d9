"""The gradient of a batch of which some groups are still being sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from relax_gym.algorithm import Algorithm
from relax_gym.types import TrainingSample
from relax_gym_trainers.torch_learner.scores import name_of
from relax_gym_trainers.torch_learner.update import Part, Tally


@dataclass(slots=True, kw_only=True)
class Stream:
    """Samples whose gradients have been added up, each sample's loss without what the whole batch divides it by."""

    samples: list[TrainingSample] = field(default_factory=list)
    parts: list[Part[Any]] = field(default_factory=list)
    loss: float = 0.0
    tally: Tally = field(default_factory=Tally)

    @property
    def trained_tokens(self) -> int:
        """Of its samples."""
        return sum(sample.trained_tokens for sample in self.samples)

    def missing(self, samples: Sequence[TrainingSample]) -> list[TrainingSample] | None:
        """The samples of a batch that it does not have; None if it has others than the batch, or one more often, whose
        gradients cannot be taken back."""
        streamed = {name_of(sample): sample for sample in self.samples}
        twice = len(streamed) < len(self.samples)
        missing = []
        for sample in samples:
            known = streamed.pop(name_of(sample), None)
            if known is None:
                missing.append(sample)
            elif not _same(known, sample):
                return None
        return None if streamed or twice else missing


def _same(one: TrainingSample, two: TrainingSample) -> bool:
    arrays = ("token_ids", "loss_mask", "logprobs", "advantages")
    equal = all(np.array_equal(getattr(one, name), getattr(two, name)) for name in arrays)
    return equal and one.mixture == two.mixture


def denominator(samples: Sequence[TrainingSample], algorithm: Algorithm) -> int:
    """What the loss of a batch's samples is divided by; see `token_weights`."""
    trained = [sample.trained_tokens for sample in samples if sample.trained_tokens]
    return sum(trained) if algorithm.aggregation == "token-mean" else len(trained)
