"""A model folder of a run's checkpoint."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from relax_gym.config import RunConfig, read_toml, validate
from relax_gym.errors import RunFolderError
from relax_gym.models import SPEAKERS, check_model
from relax_gym.producer import SLOTS_FILE
from relax_gym.run_folder import list_checkpoints

COPIED = {".json", ".safetensors", ".jinja", ".txt", ".model"}
"""Endings of the files of models and tokenizers; learners keep their state in others, or in folders. The exception is
the queue's `SLOTS_FILE`."""


def find_checkpoint(given: Path, step: int | None) -> Path:
    """A checkpoint of the run folder `given`, the newest unless `step` says which; or `given`, if that is no run.

    Raises:
        RunFolderError: there is none.
    """
    if not given.is_dir():
        raise RunFolderError(f"{given} is no folder; give that of a run, or of one of its checkpoints")
    if not (given / "config.toml").is_file():
        if step is not None:
            raise RunFolderError(f"{given} is no run folder; leave out --checkpoint")
        return given
    found = dict(list_checkpoints(given))
    if (max(found, default=None) if step is None else step) not in found:
        which, steps = "" if step is None else f" of step {step}", ", ".join(map(str, found)) or "none"
        raise RunFolderError(f"{given} has no checkpoint{which}; it has: {steps}")
    return found[max(found) if step is None else step]


def holds_model(checkpoint: Path) -> bool:
    """Whether the learner has written the weights of a checkpoint as those of a model folder."""
    return (checkpoint / "config.json").is_file()


def export(checkpoint: Path, folder: Path) -> bool:
    """Write the model folder of a checkpoint; it appears whole or not at all. Returns whether it had to be made: the
    checkpoint was not one already.

    Raises:
        RunFolderError: the folder exists, or the checkpoint holds no weights that its run's learner can read, or is
            removed by its run meanwhile.
        ModelError: the checkpoint is broken.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunFolderError(f"{folder} exists already; choose another, or delete it")
    made = not holds_model(checkpoint)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        with _kept(checkpoint):
            for file in checkpoint.iterdir():
                if file.is_file() and file.name != SLOTS_FILE and (file.suffix in COPIED or file.name == SPEAKERS):
                    shutil.copyfile(file, partial / file.name)
            if made:
                _make(checkpoint, partial)
            check_model(partial)
        os.replace(partial, folder)
    except OSError as error:
        raise RunFolderError(f"cannot write {folder}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return made


@contextmanager
def _kept(checkpoint: Path) -> Iterator[None]:
    """Raise RunFolderError, and nothing else, where a run has removed the checkpoint when the block ends: files that
    were gone may have been passed over."""
    try:
        yield
    finally:
        if not checkpoint.is_dir():
            raise RunFolderError(
                f"{checkpoint} has been removed meanwhile: its run keeps only its newest checkpoints; export one of "
                "these, or have it keep more (checkpoint.keep)"
            )


def _make(checkpoint: Path, folder: Path) -> None:
    from relax_gym.plugins import plugins
    from relax_gym.registry import load

    file = checkpoint.absolute().parent.parent / "config.toml"
    if not file.is_file():
        raise RunFolderError(
            f"{checkpoint} holds no model, and is in no run folder whose config says which learner wrote it; give a "
            "checkpoint where it lies: RUN/checkpoints/step-…"
        )
    name = validate(RunConfig, read_toml(file), source=str(file)).learner.name
    learner = load(plugins().get("learner", name).factory)
    if not hasattr(learner, "export_checkpoint"):
        raise RunFolderError(f"{checkpoint} holds no model, and the learner {name!r} cannot make one of it")
    learner.export_checkpoint(checkpoint, folder)
