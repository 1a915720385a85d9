"""What the samples of some envs are trained for: an algorithm, its teachers, and the weight of their loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from relax_gym.algorithm import Algorithm, FloatArray
from relax_gym.config import RunConfig
from relax_gym.credit import subtract_kl
from relax_gym.teacher import Distillation
from relax_gym.types import TrainingSample
from relax_gym_trainers.torch_learner.distillation import Distiller, distill_advantages
from relax_gym_trainers.torch_learner.update import Part, Tally, kl_by_sample


class Backend(Protocol):
    """What computes: one process, or one of many that all do the same and hold a share of each batch."""

    def begin(self) -> None:
        """Drop what gradient there is."""

    def plan(self, samples: Sequence[TrainingSample], *, skip_flat: bool, distiller: Distiller | None) -> Part[Any]:
        """Pack samples, or this process's share of them; `skip_flat` leaves out those without advantage."""

    def score_all(self, part: Part[Any]) -> list[Tensor]:
        """Log-probs of the trained tokens without gradient, [N] for each micro-batch."""

    def as_reference(self) -> AbstractContextManager[None]:
        """The policy has the frozen weights inside."""

    def accumulate(self, piece: Piece, *, tally: Tally, first: bool, step: int) -> float:
        """Add a piece's gradient to what will be applied and return its loss; see `accumulate_policy_gradient`."""

    def imitate(self, part: Part[Any], *, step: int) -> float:
        """Add the gradient of the mean negative log-likelihood of the trained tokens and return that mean."""

    def exchange(
        self, values: dict[TrainingSample, FloatArray], samples: Sequence[TrainingSample]
    ) -> dict[TrainingSample, FloatArray]:
        """What all processes know of the samples together, each of those of its share."""

    def merge(self, tally: Tally) -> Tally:
        """What all processes have counted together."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """The samples of one objective in one update, with the log-probs that must be known before it.

    `old` are those the ratio is taken against, None for the policy as it is at the update; `reference` those of the
    frozen model, None without KL; one tensor for each micro-batch.
    """

    objective: Objective
    part: Part[Any]
    old: list[Tensor] | None
    reference: list[Tensor] | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Objective:
    """One algorithm at work on one policy."""

    algorithm: Algorithm
    distiller: Distiller | None
    loss_weight: float
    backend: Backend

    def part(self, samples: Sequence[TrainingSample], *, skip_flat: bool) -> Part[Any]:
        """See `Backend.plan`."""
        return self.backend.plan(samples, skip_flat=skip_flat, distiller=self.distiller)

    def shape(self, samples: Sequence[TrainingSample], tally: Tally) -> Sequence[TrainingSample]:
        """The samples with what only the learner knows of their reward in their advantages: KL and teachers."""
        if self.algorithm.kl_reward_coef:
            samples = self._shape_by_reference(samples, tally)
        if self.distiller is None or self.distiller.as_loss:
            return samples
        scores = self.distiller.sampled(samples)
        for sample, score in zip(samples, scores, strict=True):
            gap = sample.logprobs[sample.loss_mask == 1] - score
            tally.mean(opd_kl=torch.from_numpy(gap), teacher_logprob=torch.from_numpy(score))
        return distill_advantages(samples, scores, weight=self.distiller.weight)

    def _shape_by_reference(self, samples: Sequence[TrainingSample], tally: Tally) -> Sequence[TrainingSample]:
        part = self.part(samples, skip_flat=False)
        if self.algorithm.old_logprobs == "rollout":
            logprobs = [torch.from_numpy(batch.logprobs) for batch in part.micro_batches]
        else:
            logprobs = self.backend.score_all(part)
        with self.backend.as_reference():
            reference = self.backend.score_all(part)
        kl = self.backend.exchange(kl_by_sample(part, logprobs, reference, self.algorithm), samples)
        for values in kl.values():
            tally.mean(kl_reward=torch.from_numpy(values))
        return subtract_kl(samples, [kl.get(sample, np.zeros(0)) for sample in samples], self.algorithm)

    def piece(self, samples: Sequence[TrainingSample], update: Sequence[TrainingSample], *, only: bool) -> Piece:
        """This objective's `samples` out of those of a whole `update`, whose totals are the loss's denominators.

        `only` says that the step has no other update, so that the policy at the update is the one before it.
        """
        taught = self.distiller is not None and self.distiller.as_loss
        flat_matters = taught or self.algorithm.kl_coef > 0 or self.algorithm.entropy_coef > 0
        trained = [sample.trained_tokens for sample in update if sample.trained_tokens]
        part = dataclasses.replace(
            self.part(samples, skip_flat=not flat_matters),
            total_tokens=sum(trained),
            total_samples=len(trained),
            loss_weight=self.loss_weight,
        )
        return Piece(
            objective=self, part=part, old=self._old_logprobs(part, only), reference=self._reference_logprobs(part)
        )

    def _old_logprobs(self, part: Part[Any], only: bool) -> list[Tensor] | None:
        if self.algorithm.old_logprobs == "rollout":
            return [torch.from_numpy(batch.logprobs) for batch in part.micro_batches]
        return None if only else self.backend.score_all(part)

    def _reference_logprobs(self, part: Part[Any]) -> list[Tensor] | None:
        if not self.algorithm.kl_coef:
            return None
        with self.backend.as_reference():
            return self.backend.score_all(part)


def build_objectives(
    algorithms: Sequence[Algorithm],
    config: RunConfig,
    backend: Backend,
    load: Callable[[Distillation | None], Distiller | None],
) -> list[Objective]:
    """One for each `[[env]]`; envs with the same algorithm and weight share theirs, and those with the same algorithm
    its teachers, which `load` makes."""
    distillers = {id(a): load(a.distillation) for a in {id(a): a for a in algorithms}.values()}
    built: dict[tuple[int, float], Objective] = {}
    keys = [(id(algorithm), env.loss_weight) for algorithm, env in zip(algorithms, config.env, strict=True)]
    for key, algorithm in zip(keys, algorithms, strict=True):
        built[key] = built.get(key) or Objective(
            algorithm=algorithm, distiller=distillers[id(algorithm)], loss_weight=key[1], backend=backend
        )
    return [built[key] for key in keys]
