"""Steps of learners whose groups were streamed."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_learner_kit import Outcome, gap

from relax_gym.types import Batch
from relax_gym_trainers.policy_learner import PolicyLearner
from relax_gym_trainers.torch_learner.scores import by_group

TOLERANCE = 3e-5  # sums in another order, of a loss of nearly 0, too
STREAM = {"stream": True}


def streamed(trainer: PolicyLearner, batches: Sequence[Batch], ahead: Sequence[slice]) -> Outcome:
    """Steps before each of which these of its groups were prepared."""
    metrics = []
    for batch in batches:
        groups = by_group(batch.samples)
        for some in ahead:
            trainer.prepare([sample for group in groups[some] for sample in group])
        metrics.append(trainer.step(batch))
    return Outcome(metrics, {name: tensor.clone() for name, tensor in trainer.weights()})


def apart(found: Outcome, plain: Outcome) -> dict[str, float]:
    """What is further apart than sums in another order are; what only streams say is left out."""
    metrics = [{name: value for name, value in one.items() if name != "streamed_tokens"} for one in found.metrics]
    return {name: far for name, far in gap(Outcome(metrics, found.weights), plain).items() if far > TOLERANCE}
