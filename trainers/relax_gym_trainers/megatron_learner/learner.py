"""The Megatron learner as the trainer sees it: a front for all its ranks."""

from __future__ import annotations

from pathlib import Path

from relax_gym.context import RunContext
from relax_gym.learner import Learner
from relax_gym.sampler import Weights
from relax_gym.types import Batch, Metrics
from relax_gym_trainers.megatron_learner.options import MegatronLearnerOptions
from relax_gym_trainers.megatron_learner.ranks import Ranks

ENTRY = "relax_gym_trainers.megatron_learner.rank:RankLearner"


class MegatronLearner(Learner):
    """Rank 0 in this process, the others in processes of their own or of a launcher. Every call is one of all ranks:
    when one of them fails, dies or hangs, the call says which, and all have ended."""

    def __init__(self, context: RunContext, options: MegatronLearnerOptions) -> None:
        """Start the ranks and load the model on them.

        Raises:
            ConfigError: the model cannot be laid out so, or a launcher has started another number of processes.
            TrainingError: a rank cannot be started.
        """
        self._ranks = Ranks(
            options.tp * options.pp * options.cp * options.dp,
            ENTRY,
            (context, options),
            logs=context.run_dir / "learner",
            timeout=options.timeout,
            start_timeout=options.start_timeout,
        )
        self.version = 0

    def step(self, batch: Batch) -> Metrics:
        """See `PolicyLearner.step`."""
        metrics: Metrics = self._ranks.call("step", batch)
        self.version += 1
        return metrics

    def imitate(self, batch: Batch, *, lr: float) -> Metrics:
        """See `PolicyLearner.imitate`."""
        metrics: Metrics = self._ranks.call("imitate_at", batch, lr)
        return metrics

    def weights(self) -> Weights:
        """New tensors on rank 0's device, in the dtype that is trained in, gathered from all ranks some at a time: those
        that come next while these are used. May be left at any point: no rank waits for the rest to be asked for."""
        self._ranks.call("begin_weights")
        following = self._ranks.begin("next_weights")
        while some := following():
            following = self._ranks.begin("next_weights")
            yield from some

    def export(self, folder: Path) -> None:
        """See `Learner.export`. Only rank 0 writes."""
        self._ranks.call("export", folder)

    def save_state(self, folder: Path) -> None:
        """See `Learner.save_state`."""
        self._ranks.call("save_state", folder)

    def load(self, folder: Path) -> None:
        """See `Learner.load`."""
        self.version = self._ranks.call("load", folder)

    def close(self) -> None:
        """See `Learner.close`."""
        self._ranks.close()
