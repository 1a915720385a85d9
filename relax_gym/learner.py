"""The learner contract: batches in, metrics and new weights out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from relax_gym.context import RunContext
from relax_gym.errors import RunFolderError
from relax_gym.sampler import Weights
from relax_gym.types import Batch, Metrics, TrainingSample


class Learner(ABC):
    """Owns the weights. All methods block and are called from one worker thread at a time, never the event loop."""

    version: int = 0
    """Steps taken. The policy version of the weights is that divided by `train.update_every`, rounded down."""
    exports_checkpoints: bool = True
    """Whether `export` is to make checkpoints model folders, too. Else `save_state` does, or `export_checkpoint` when
    one is wanted."""

    @classmethod  # noqa: B027 (a learner may take any model)
    def check_model(cls, context: RunContext, options: Any) -> None:
        """Raise what building the learner would for this model and these teachers, as far as it takes no weights.

        Called by `--dry-run`, and before the learner is built.
        """

    @abstractmethod
    def step(self, batch: Batch) -> Metrics:
        """One update on the global batch; raises `version` by one. Samples without advantage may be skipped.

        The gradient does not depend on how the batch is cut into micro-batches or spread over ranks.
        """

    def prepare(self, samples: Sequence[TrainingSample]) -> None:  # noqa: B027 (most learners have nothing to prepare)
        """Samples of whole groups that the next `step` is likely to have: do what can be done. Their advantages
        lack what an algorithm does over the whole batch (`needs_batch`).

        Called while that step waits for other groups, after the weights were published. `step` must give the same
        without it, and with other samples than were prepared: bit for bit, but where an option of the learner says
        otherwise.
        """

    @abstractmethod
    def imitate(self, batch: Batch, *, lr: float) -> Metrics:
        """One supervised step (token-mean negative log-likelihood of the masked tokens). `version` stays."""

    @abstractmethod
    def weights(self) -> Weights:
        """Current weights under Hugging Face names, for a sampler. Tensors may be views: copy before the next step."""

    def rest(self) -> None:  # noqa: B027 (most learners keep nothing)
        """The sampler needs the memory of devices that both share: free what the next step can take again."""

    @abstractmethod
    def export(self, folder: Path) -> None:
        """Write the weights as a Hugging Face model folder that `transformers` loads."""

    @abstractmethod
    def save_state(self, folder: Path) -> Callable[[], None] | None:
        """Write everything but the exported weights that `load` needs to go on bit for bit.

        A learner that goes on writing in the background returns what waits for the end of that and raises what went
        wrong. It is called once, in the same thread, before the next `save_state` and before `close`; until then the
        folder is no checkpoint.
        """

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Take weights and state from a folder that `export` and `save_state` wrote."""

    @classmethod
    def export_checkpoint(cls, checkpoint: Path, folder: Path) -> None:
        """Write the model folder of a checkpoint that is none, without tokenizer, in a process without a learner.

        Raises:
            RunFolderError: the checkpoint has no weights that this kind of learner has written.
        """
        raise RunFolderError(f"{checkpoint} holds no model, and {cls.__name__} cannot make one of it")

    def close(self) -> None:  # noqa: B027 (most learners have nothing to free)
        """Free devices and processes. Idempotent."""
