"""What the samples of some envs are trained for: an algorithm, its teachers, and the weight of their loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from relax_gym.algorithm import Algorithm
from relax_gym.credit import subtract_kl
from relax_gym.types import TrainingSample
from relax_gym_trainers.torch_learner.distillation import Distiller, distill_advantages
from relax_gym_trainers.torch_learner.options import TorchLearnerOptions
from relax_gym_trainers.torch_learner.policy import Policy
from relax_gym_trainers.torch_learner.update import (
    Part,
    Tally,
    accumulate_policy_gradient,
    kl_by_sample,
    plan,
    score_all,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """The samples of one objective in one update, with the log-probs that must be known before it.

    `old` are those the ratio is taken against, None for the policy as it is at the update; `reference` those of the
    frozen model, None without KL; one tensor for each micro-batch.
    """

    objective: Objective
    part: Part
    old: list[Tensor] | None
    reference: list[Tensor] | None

    def accumulate(self, *, tally: Tally, first: bool, step: int) -> float:
        """Add this piece's gradient to `.grad` and return its share of the loss."""
        return accumulate_policy_gradient(
            self.objective.policy,
            self.objective.algorithm,
            self.part,
            old=self.old,
            reference=self.reference,
            tally=tally,
            first=first,
            step=step,
            distiller=self.objective.distiller,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Objective:
    """One algorithm at work on one policy. `as_reference` puts the frozen weights into the policy while it is open."""

    algorithm: Algorithm
    distiller: Distiller | None
    loss_weight: float
    policy: Policy
    options: TorchLearnerOptions
    as_reference: Callable[[], AbstractContextManager[None]]

    def part(self, samples: Sequence[TrainingSample], *, skip_flat: bool) -> Part:
        """Pack samples; `skip_flat` leaves out those without advantage."""
        teaching = self.distiller
        return plan(
            samples,
            budget=self.options.micro_batch_tokens,
            share_prefix=self.policy.share_prefix and (teaching is None or teaching.share_prefix),
            skip_flat=skip_flat,
            pair_cost=self.policy.pair_cost,
            apart=None if teaching is None else teaching.owner,
        )

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
            logprobs = score_all(self.policy, part.micro_batches)
        with self.as_reference():
            reference = score_all(self.policy, part.micro_batches)
        kl = kl_by_sample(part, logprobs, reference, self.algorithm)
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

    def _old_logprobs(self, part: Part, only: bool) -> list[Tensor] | None:
        if self.algorithm.old_logprobs == "rollout":
            return [torch.from_numpy(batch.logprobs) for batch in part.micro_batches]
        return None if only else score_all(self.policy, part.micro_batches)

    def _reference_logprobs(self, part: Part) -> list[Tensor] | None:
        if not self.algorithm.kl_coef:
            return None
        with self.as_reference():
            return score_all(self.policy, part.micro_batches)
