"""The Megatron learner as the trainer sees it: a front for all its ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from relax_gym.config import load_algorithms
from relax_gym.context import RunContext
from relax_gym.errors import ConfigError
from relax_gym.learner import Learner
from relax_gym.sampler import Weights
from relax_gym.types import Batch, Metrics, TrainingSample
from relax_gym_trainers.megatron_learner.options import MegatronLearnerOptions
from relax_gym_trainers.megatron_learner.ranks import Ranks
from relax_gym_trainers.torch_learner.objectives import asked_for

BUCKET_BYTES = 1 << 28
"""Of weights that are gathered while as many before them are sent."""
ENTRY = "relax_gym_trainers.megatron_learner.rank:RankLearner"


class MegatronLearner(Learner):
    """Rank 0 in this process, the others in processes of their own or of a launcher. Every call is one of all ranks:
    when one of them fails, dies or hangs, the call says which, and all have ended."""

    exports_checkpoints = False  # `save_state` writes the model, in the background

    def __init__(self, context: RunContext, options: MegatronLearnerOptions) -> None:
        """Start the ranks and load the model on them.

        Raises:
            ConfigError: the model cannot be laid out so, or a launcher has started another number of processes.
            TrainingError: a rank cannot be started.
        """
        # Other ranks may run in other directories.
        context = replace(context, run_dir=context.run_dir.absolute(), model_path=context.model_path.absolute())
        self._ranks = Ranks(
            options.tp * options.pp * options.cp * options.dp,
            ENTRY,
            (context, options),
            logs=context.run_dir / "learner",
            launcher=options.launcher,
            timeout=options.timeout,
            start_timeout=options.start_timeout,
        )
        only = options.updates_per_step * options.epochs == 1
        self._prepares = options.stream or any(
            asked_for(algorithm, only=only) for algorithm in load_algorithms(context.config)
        )
        self.version = 0
        self._finish: Callable[[], None] | None = None

    @classmethod
    def check_model(cls, context: RunContext, options: MegatronLearnerOptions) -> None:
        """See `Learner.check_model`."""
        if not isinstance(options, MegatronLearnerOptions):  # those of a subclass
            return
        try:
            from relax_gym_trainers.megatron_learner.checks import check_model
        except ImportError as error:
            needed = 'learner.name = "megatron" needs megatron-core: pip install "relax-gym[megatron]"'
            raise ConfigError(f"{needed} ({error})") from error
        check_model(context, options)

    def step(self, batch: Batch) -> Metrics:
        """See `PolicyLearner.step`."""
        metrics: Metrics = self._ranks.call("step", batch)
        self.version += 1
        return metrics

    def prepare(self, samples: Sequence[TrainingSample]) -> None:
        """See `PolicyLearner.prepare`."""
        if self._prepares:
            self._ranks.call("prepare", list(samples))

    def imitate(self, batch: Batch, *, lr: float) -> Metrics:
        """See `PolicyLearner.imitate`."""
        metrics: Metrics = self._ranks.call("imitate_at", batch, lr)
        return metrics

    def rest(self) -> None:
        """See `RankLearner.rest`."""
        self._ranks.call("rest")

    def weights(self) -> Weights:
        """New tensors on rank 0's device, in the dtype that is trained in, gathered some at a time: the next ones while
        these are used. May be left at any point: no rank waits for the rest to be asked for."""
        self._ranks.call("begin_weights")
        following = self._ranks.begin("next_weights", BUCKET_BYTES)
        while some := following():
            following = self._ranks.begin("next_weights", BUCKET_BYTES)
            yield from some

    def export(self, folder: Path) -> None:
        """See `Learner.export`. Only rank 0 writes."""
        self._ranks.call("export", folder.absolute())

    def save_state(self, folder: Path) -> Callable[[], None]:
        """See `Learner.save_state`: all ranks have copied their state to host memory and go on writing it."""
        self._ranks.call("save_state", folder.absolute())
        self._finish = partial(self._ranks.call, "finish_save")
        return self._finish_save

    def load(self, folder: Path) -> None:
        """See `Learner.load`. The state may be of another layout; the weights equal those saved, bit for bit."""
        self.version = self._ranks.call("load_state", folder.absolute())

    @classmethod
    def export_checkpoint(cls, checkpoint: Path, folder: Path) -> None:
        """See `Learner.export_checkpoint`: in this process, on the CPU, in the dtype that was trained in."""
        from relax_gym_trainers.megatron_learner.checkpoint_export import export_checkpoint

        export_checkpoint(checkpoint, folder)

    def close(self) -> None:
        """See `Learner.close`. What is being written is finished first."""
        try:
            self._finish_save()
        finally:
            self._ranks.close()

    def _finish_save(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
