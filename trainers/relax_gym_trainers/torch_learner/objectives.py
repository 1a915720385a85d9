"""What the samples of some envs are trained for: an algorithm, its teachers, and the weight of their loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax_gym.algorithm import Algorithm, FloatArray
from relax_gym.config import RunConfig
from relax_gym.credit import subtract_kl
from relax_gym.teacher import Distillation
from relax_gym.types import TrainingSample
from relax_gym_trainers.torch_learner.distillation import Distiller, distill_advantages
from relax_gym_trainers.torch_learner.scores import Found, GroupScores, Values, joined, name_of
from relax_gym_trainers.torch_learner.update import Part, Tally, reward_kl


class Backend(Protocol):
    """What computes: one process, or one of many that all do the same and hold a share of each batch."""

    def begin(self) -> None:
        """Drop what gradient there is."""

    def plan(self, samples: Sequence[TrainingSample], *, skip_flat: bool, distiller: Distiller | None) -> Part[Any]:
        """Pack samples, or this process's share of them; `skip_flat` leaves out those without advantage."""

    def score_all(self, micro_batches: Sequence[Any]) -> list[Tensor]:
        """Log-probs of the trained tokens without gradient, [N] for each of the micro-batches of any parts."""

    def as_reference(self) -> AbstractContextManager[None]:
        """The policy has the frozen weights inside."""

    def accumulate(self, piece: Piece, *, tally: Tally, first: bool, step: int) -> float:
        """Add a piece's gradient to what will be applied and return its loss; see `accumulate_policy_gradient`."""

    def scale(self, factor: float) -> None:
        """Multiply what gradient there is."""

    def imitate(self, part: Part[Any], *, step: int) -> float:
        """Add the gradient of the mean negative log-likelihood of the trained tokens and return that mean."""

    def exchange(
        self, values: dict[TrainingSample, NDArray[Any]], samples: Sequence[TrainingSample]
    ) -> dict[TrainingSample, NDArray[Any]]:
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
    policy: GroupScores = field(init=False)
    reference: GroupScores = field(init=False)
    teachers: GroupScores = field(init=False)

    def __post_init__(self) -> None:
        """Nothing is known of any sample."""
        object.__setattr__(self, "policy", GroupScores(self._score))
        object.__setattr__(self, "reference", GroupScores(self._score_as_reference))
        object.__setattr__(self, "teachers", GroupScores(self._ask_teachers))

    def part(self, samples: Sequence[TrainingSample], *, skip_flat: bool) -> Part[Any]:
        """See `Backend.plan`."""
        return self.backend.plan(samples, skip_flat=skip_flat, distiller=self.distiller)

    def prepare(self, samples: Sequence[TrainingSample], *, only: bool) -> None:
        """Compute what `shape` and `piece` will ask for of a group's samples."""
        for name in asked_for(self.algorithm, only=only):
            getattr(self, name).of(samples)

    def forget(self) -> None:
        """The weights have changed, and the samples are gone."""
        for scores in (self.policy, self.reference, self.teachers):
            scores.forget()

    def reward_kl(self, samples: Sequence[TrainingSample], tally: Tally) -> list[FloatArray]:
        """The reward's KL to the reference at each sample's trained tokens."""
        reference = self.reference.of(samples)
        own = {} if self.algorithm.old_logprobs == "rollout" else self.policy.of(samples)
        kl = []
        for sample in samples:
            rollout = sample.logprobs[sample.loss_mask == 1]
            new, ref = own.get(name_of(sample), rollout), reference.get(name_of(sample), rollout)
            kl.append(reward_kl(new, ref, self.algorithm))
            tally.mean(kl_reward=torch.from_numpy(kl[-1]))
        return kl

    def distill(self, samples: Sequence[TrainingSample], tally: Tally) -> Sequence[TrainingSample]:
        """The samples with the teachers' reward, if there is one, in their advantages."""
        if self.distiller is None or self.distiller.as_loss:
            return samples
        known = self.teachers.of(samples)
        scores = [known[name_of(sample)] for sample in samples]
        for sample, score in zip(samples, scores, strict=True):
            gap = sample.logprobs[sample.loss_mask == 1] - score
            tally.mean(opd_kl=torch.from_numpy(gap), teacher_logprob=torch.from_numpy(score))
        return distill_advantages(samples, scores, weight=self.distiller.weight)

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
            objective=self,
            part=part,
            old=self._old_logprobs(part, samples, only),
            reference=self._reference_logprobs(part, samples),
        )

    def _old_logprobs(self, part: Part[Any], samples: Sequence[TrainingSample], only: bool) -> list[Tensor] | None:
        if self.algorithm.old_logprobs == "rollout":
            return [torch.from_numpy(batch.logprobs) for batch in part.micro_batches]
        return None if only else _by_batch(part, self.policy.of(samples))

    def _reference_logprobs(self, part: Part[Any], samples: Sequence[TrainingSample]) -> list[Tensor] | None:
        return _by_batch(part, self.reference.of(samples)) if self.algorithm.kl_coef else None

    def _score(self, groups: Sequence[Sequence[TrainingSample]]) -> list[Values]:
        """Each group is cut into micro-batches by itself, and all go through the model one after the other."""
        parts = [self.part(group, skip_flat=False) for group in groups]
        batches = [batch for part in parts for batch in part.micro_batches]
        found: Values = {}
        for batch, scores in zip(batches, self.backend.score_all(batches), strict=True):
            values = np.split(scores.cpu().numpy(), np.cumsum(batch.token_counts))[:-1]
            found |= zip(batch.members, values, strict=True)
        found = self.backend.exchange(found, [sample for group in groups for sample in group])
        return [{sample: found[sample] for sample in group if sample in found} for group in groups]

    def _score_as_reference(self, groups: Sequence[Sequence[TrainingSample]]) -> list[Values]:
        with self.backend.as_reference():  # once for all: its weights may be far away
            return self._score(groups)

    def _ask_teachers(self, groups: Sequence[Sequence[TrainingSample]]) -> list[Values]:
        assert self.distiller is not None
        scores = self.distiller.sampled(groups)
        return [dict(zip(group, found, strict=True)) for group, found in zip(groups, scores, strict=True)]


def shape(
    samples: Sequence[TrainingSample], objectives: Mapping[Objective, Sequence[int]], tally: Tally
) -> list[TrainingSample]:
    """The samples with what only the learner knows of their reward in their advantages: KL and teachers.

    `objectives` have the indices of their samples. What is done over the whole batch is done over all samples of an
    algorithm, whatever the weights of their losses.
    """
    shaped = list(samples)
    for algorithm in {id(objective.algorithm): objective.algorithm for objective in objectives}.values():
        if algorithm.kl_reward_coef:
            kl: dict[int, FloatArray] = {}
            for objective, own in objectives.items():
                if objective.algorithm is algorithm:
                    kl |= zip(own, objective.reward_kl([samples[index] for index in own], tally), strict=True)
            order = sorted(kl)
            less = subtract_kl([samples[index] for index in order], [kl[index] for index in order], algorithm)
            for index, sample in zip(order, less, strict=True):
                shaped[index] = sample
    for objective, own in objectives.items():
        for index, sample in zip(own, objective.distill([shaped[index] for index in own], tally), strict=True):
            shaped[index] = sample
    return shaped


def asked_for(algorithm: Algorithm, *, only: bool) -> list[str]:
    """Which of an objective's `GroupScores` its steps ask for."""
    own = algorithm.old_logprobs == "recompute" and (algorithm.kl_reward_coef > 0 or not only)
    taught = algorithm.distillation is not None and algorithm.distillation.level == "reward"
    return [
        name for name, used in (("policy", own), ("reference", algorithm.needs_reference), ("teachers", taught)) if used
    ]


def _by_batch(part: Part[Any], found: Found) -> list[Tensor]:
    return [torch.from_numpy(joined(found, batch.members)) for batch in part.micro_batches]


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
