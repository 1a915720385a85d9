"""The checkpoints of a run: begun after a step, there once all of them is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from relax_gym.context import RunContext
from relax_gym.learner import Learner
from relax_gym.run_folder import RunFolder


class Checkpoints:
    """Lets a learner write them. All methods block and are called in the learner's thread."""

    def __init__(self, context: RunContext, learner: Learner, folder: RunFolder) -> None:
        self._tokenizer = context.processor.processor if context.processor else context.tokenizer
        self._keep = context.config.checkpoint.keep
        self._learner, self._folder = learner, folder
        self._unfinished: tuple[int, Callable[[], None]] | None = None

    def begin(self, step: int, files: Mapping[str, str]) -> tuple[int, Path] | None:
        """Step and folder of the checkpoint; None where the learner goes on writing it, for `finish` to wait for.

        `files` are the names and texts of what else belongs into it.
        """
        with self._folder.writing_checkpoint(step):
            folder = self._folder.begin_checkpoint(step)
            for name, text in files.items():
                (folder / name).write_text(text, encoding="utf-8")
            if self._learner.exports_checkpoints:
                self._learner.export(folder)
            self._tokenizer.save_pretrained(folder)
            if wait := self._learner.save_state(folder):
                self._unfinished = step, wait
                return None
            return step, self._folder.finish_checkpoint(step, keep=self._keep)

    def finish(self) -> tuple[int, Path] | None:
        """What was begun and not finished is there when this returns. None where there is nothing.

        Raises what the learner has to say of its writing.
        """
        if self._unfinished is None:
            return None
        (step, wait), self._unfinished = self._unfinished, None
        with self._folder.writing_checkpoint(step):
            wait()
            return step, self._folder.finish_checkpoint(step, keep=self._keep)
