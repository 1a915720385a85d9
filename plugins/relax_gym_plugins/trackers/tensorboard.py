"""Metrics as TensorBoard scalars in `<run_dir>/tensorboard`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from pydantic import Field

from relax_gym.config import Options
from relax_gym.context import RunContext
from relax_gym.disk import THEN_RESUME, explained


class TensorBoardOptions(Options):
    """`[[trackers]]` with name `tensorboard`."""

    flush_seconds: int = Field(10, ge=1, description="how often events are written to disk")


class TensorBoardTracker:
    """Writes every metric as one scalar. A resumed run hides the points that it makes again, once it makes the first.

    Without a checkpoint these are all, step 0 included.
    """

    def __init__(self, context: RunContext, options: TensorBoardOptions) -> None:
        from torch.utils.tensorboard import SummaryWriter

        start_step = context.start_step
        self._folder = str(context.run_dir / "tensorboard")
        self._open = partial(
            SummaryWriter,
            log_dir=self._folder,
            purge_step=start_step + 1 if start_step else 0,
            flush_secs=options.flush_seconds,
        )
        self._writer: SummaryWriter | None = None
        self._closed = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one point for each metric at `step`."""
        if self._closed:
            raise RuntimeError("the TensorBoard tracker is closed; log before close()")
        with explained(self._folder, THEN_RESUME):
            if self._writer is None:
                self._writer = self._open()
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and end. Idempotent."""
        closed, self._closed = self._closed, True
        if self._writer is not None and not closed:
            with explained(self._folder, THEN_RESUME):
                self._writer.close()
