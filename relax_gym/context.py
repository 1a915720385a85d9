"""What every part of a run is built from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from relax_gym.config import RunConfig
    from relax_gym.processing import MediaProcessor


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """Handed to the factory of every component and to the observers.

    `never_sampled` are the ids that no sampler gives, so that a learner's distributions are without them too.
    """

    config: RunConfig
    run_dir: Path
    model_path: Path
    tokenizer: PreTrainedTokenizerBase
    processor: MediaProcessor | None = None
    never_sampled: tuple[int, ...] = ()
    start_step: int = 0


class Tracker(Protocol):
    """Receives the metrics of a run. Built by a `register_trackers` component."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of one step (0 is before training)."""
        ...

    def close(self) -> None:
        """Flush. Idempotent."""
        ...
