"""The learner contract: batches in, metrics and new weights out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from relax_gym.sampler import Weights
from relax_gym.types import Batch, Metrics


class Learner(ABC):
    """Owns the weights. All methods block and are called from one worker thread at a time, never the event loop."""

    version: int = 0
    """Optimizer steps taken; the policy version of the weights `weights()` gives."""

    @abstractmethod
    def step(self, batch: Batch) -> Metrics:
        """One update on the global batch; raises `version` by one. Samples without advantage may be skipped.

        The gradient does not depend on how the batch is cut into micro-batches or spread over ranks.
        """

    @abstractmethod
    def imitate(self, batch: Batch, *, lr: float) -> Metrics:
        """One supervised step (token-mean negative log-likelihood of the masked tokens). `version` stays."""

    @abstractmethod
    def weights(self) -> Weights:
        """Current weights under Hugging Face names, for a sampler. Tensors may be views: copy before the next step."""

    @abstractmethod
    def export(self, folder: Path) -> None:
        """Write the weights as a Hugging Face model folder that `transformers` loads."""

    @abstractmethod
    def save_state(self, folder: Path) -> None:
        """Write everything but the exported weights that `load` needs to go on bit for bit."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Take weights and state from a folder that `export` and `save_state` wrote."""

    def close(self) -> None:  # noqa: B027 (most learners have nothing to free)
        """Free devices and processes. Idempotent."""
