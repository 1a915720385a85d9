"""One process as a `Backend`: the policy, and the frozen weights of its reference."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from numpy.typing import NDArray
from torch import Tensor

from relax_gym.types import TrainingSample
from relax_gym_trainers.reference import Reference
from relax_gym_trainers.torch_learner.distillation import Distiller
from relax_gym_trainers.torch_learner.objectives import Piece
from relax_gym_trainers.torch_learner.options import TorchLearnerOptions
from relax_gym_trainers.torch_learner.packing import MicroBatch
from relax_gym_trainers.torch_learner.policy import Policy
from relax_gym_trainers.torch_learner.update import (
    Part,
    Tally,
    accumulate_imitation_gradient,
    accumulate_policy_gradient,
    plan,
    score_all,
)


class TorchBackend:
    """See `Backend`. Gradients are added to `.grad`."""

    def __init__(self, policy: Policy, options: TorchLearnerOptions) -> None:
        """The parameters of `policy` that need a gradient are the ones trained."""
        self.policy, self.options = policy, options
        self.parameters = [parameter for parameter in policy.model.parameters() if parameter.requires_grad]
        self.reference = Reference(self.parameters)

    def begin(self) -> None:
        """See `Backend.begin`."""
        for parameter in self.parameters:
            parameter.grad = None

    def plan(
        self, samples: Sequence[TrainingSample], *, skip_flat: bool, distiller: Distiller | None = None
    ) -> Part[MicroBatch]:
        """See `Backend.plan`."""
        return plan(
            samples,
            budget=self.options.micro_batch_tokens,
            share_prefix=self.policy.share_prefix and (distiller is None or distiller.share_prefix),
            skip_flat=skip_flat,
            pair_cost=self.policy.pair_cost,
            apart=None if distiller is None else distiller.owner,
        )

    def score_all(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """See `Backend.score_all`."""
        return score_all(self.policy, micro_batches)

    def accumulate(self, piece: Piece, *, tally: Tally, first: bool, step: int) -> float:
        """See `Backend.accumulate`."""
        return accumulate_policy_gradient(
            self.policy,
            piece.objective.algorithm,
            piece.part,
            old=piece.old,
            reference=piece.reference,
            tally=tally,
            first=first,
            step=step,
            distiller=piece.objective.distiller,
        )

    def scale(self, factor: float) -> None:
        """See `Backend.scale`."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad *= factor

    def imitate(self, part: Part[MicroBatch], *, step: int) -> float:
        """See `Backend.imitate`."""
        return accumulate_imitation_gradient(self.policy, part, step=step)

    def exchange(
        self, values: dict[TrainingSample, NDArray[Any]], samples: Sequence[TrainingSample]
    ) -> dict[TrainingSample, NDArray[Any]]:
        """See `Backend.exchange`."""
        return values

    def as_reference(self) -> AbstractContextManager[None]:
        """See `Backend.as_reference`."""
        return self.reference.inside()

    def merge(self, tally: Tally) -> Tally:
        """See `Backend.merge`."""
        return tally.settle()
