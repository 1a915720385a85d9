"""The folder of one run: config, manifest, metrics, episodes, checkpoints. Everything in it is written atomically or
line by line, so a process killed at any moment leaves a folder that `--resume` continues."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from relax_gym.config import RunConfig, dump_config
from relax_gym.disk import OR_ANOTHER, THEN_RESUME, explained, no_room, probe, write_atomically
from relax_gym.errors import RunFolderError
from relax_gym.kept_config import check_same_run, kept_config
from relax_gym.lines import append_line, cut_lines, keep_lines
from relax_gym.manifest import manifest
from relax_gym.media.files import MediaFolder
from relax_gym.types import Group, Trajectory

log = logging.getLogger("relax_gym")
UNFINISHED = ".unfinished-"
RESULTS_FILE = "results.json"
"""Of an evaluation's folder, once it has played all."""


class RunFolder:
    """A folder that can be written and holds no run yet, or (resuming) this one. It is the run's from `begin` on.

    Raises:
        RunFolderError: it cannot be written, holds a run already, or (resuming) holds another run or none.
        ConfigError: (resuming) its config cannot be read.
    """

    def __init__(self, config: RunConfig, *, resume: bool) -> None:
        self.path = Path(config.run_dir)
        self.metrics_path = self.path / "metrics.jsonl"
        self.episodes_path = self.path / "episodes.jsonl"
        self._checkpoints = self.path / "checkpoints"
        self._config_path = self.path / "config.toml"
        self._media = MediaFolder(self.path / "media", config.media.keep_gib * 2**30)
        self._config = config
        self._resume = resume
        check_run_folder(config, resume=resume)
        with explained(f"run folder {str(self.path)!r}", OR_ANOTHER):
            self.path.mkdir(parents=True, exist_ok=True)
            probe(self.path)

    def begin(self, start_step: int) -> None:
        """The run starts after `start_step`: whatever could keep it from starting has gone well.

        Metrics and episodes of a resumed run that are later than that are forgotten; without a checkpoint, all are.

        Raises:
            RunFolderError: as above; another process may have come first.
        """
        check_run_folder(self._config, resume=self._resume)
        if self._resume:
            self._note_other_steps()
        with explained(f"run folder {str(self.path)!r}", OR_ANOTHER):
            if not self._resume:
                write_atomically(
                    self.path / "manifest.json", json.dumps(manifest(self._config), indent=2, default=str).encode()
                )
            write_atomically(
                self._config_path, dump_config(self._config).encode()
            )  # last: it is what makes this a run folder
            self.truncate(start_step or -1)

    def _note_other_steps(self) -> None:
        before, now = kept_config(self._config_path).train.steps, self._config.train.steps
        if before != now:
            log.info(
                "train.steps was %d and is %d: a learning-rate schedule over all steps goes on as one over %d",
                before,
                now,
                now,
            )

    # Lines -----------------------------------------------------------------------------------------------------------

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line to metrics.jsonl. Raises RunFolderError when it cannot be written."""
        with explained(str(self.metrics_path), THEN_RESUME):
            append_line(self.metrics_path, {"step": step, **metrics})

    def add_group(self, step: int, group: Group, *, kind: str) -> None:
        """Append the group's episodes to episodes.jsonl.

        `kind` is train, eval, the reason it was dropped, or queued: finished, but the run ended before its step.

        Raises:
            RunFolderError: they cannot be written.
        """
        where = {"step": step, "kind": kind, "group_id": group.group_id, "slot": group.slot, "attempt": group.attempt}
        with explained(str(self.episodes_path), THEN_RESUME):
            for trajectory in group.trajectories:
                append_line(self.episodes_path, {**where, **episode_record(trajectory)}, self._media.keep)

    def truncate(self, step: int) -> None:
        """Forget metrics and episodes later than `step`: they will be made again."""
        keep_lines(self.metrics_path, lambda line: line["step"] <= step)
        # What is dropped for a step may have a line before the last of those of the step before, but no earlier one.
        cut_lines(
            self.episodes_path,
            wanted=lambda line: line["step"] <= step and line["kind"] != "queued",
            settled=lambda line: line["step"] < step and line["kind"] != "queued",
        )

    def close(self) -> None:
        """Wait for the media that are still being written. Idempotent."""
        self._media.close()

    # Checkpoints -----------------------------------------------------------------------------------------------------

    @contextmanager
    def writing_checkpoint(self, step: int) -> Iterator[None]:
        """What goes wrong in the block leaves nothing of what was begun: the rest of the run needs the room.

        Raises:
            RunFolderError: there is no room, whatever the libraries that write make of that.
        """
        with explained(f"checkpoint {str(self._checkpoints / f'step-{step:06d}')!r}", THEN_RESUME):
            try:
                yield
            except Exception as error:
                cause = error if isinstance(error, OSError) else no_room(error, self._checkpoints)
                shutil.rmtree(self._checkpoints / f"{UNFINISHED}{step:06d}", ignore_errors=True)
                if cause is None or cause is error:
                    raise
                raise cause from error

    def begin_checkpoint(self, step: int) -> Path:
        """An empty folder for the checkpoint of `step`, which is none yet. What was never finished is removed."""
        for unfinished in self._checkpoints.glob(f"{UNFINISHED}*"):
            shutil.rmtree(unfinished, ignore_errors=True)
        folder = self._checkpoints / f"{UNFINISHED}{step:06d}"
        folder.mkdir(parents=True)
        return folder

    def finish_checkpoint(self, step: int, *, keep: int) -> Path:
        """Make what was begun the checkpoint of `step` in one rename; keep the newest `keep`."""
        final = self._checkpoints / f"step-{step:06d}"
        shutil.rmtree(final, ignore_errors=True)
        os.replace(self._checkpoints / f"{UNFINISHED}{step:06d}", final)
        for _, old in self.checkpoints()[:-keep]:
            leaving = self._checkpoints / f"{UNFINISHED}{old.name}"  # half of a checkpoint must not look like one
            os.replace(old, leaving)
            shutil.rmtree(leaving)
        return final

    def checkpoints(self) -> list[tuple[int, Path]]:
        """(step, folder) of every complete checkpoint, oldest first."""
        return list_checkpoints(self.path)


def check_run_folder(config: RunConfig, *, resume: bool) -> None:
    """Write nothing and raise what RunFolder would, but for what only a write shows, such as a full disk."""
    path = Path(config.run_dir)
    with explained(f"run folder {str(path)!r}", OR_ANOTHER):
        begun = (path / "config.toml").exists()
        existing = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
        if not existing.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(existing, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    if resume:
        check_same_run(config, path)
    elif begun:
        raise RunFolderError(
            f"run folder {str(path)!r} already holds a run; continue it with --resume, or choose another with "
            f"--set run_dir=..., or delete it"
        )


def list_checkpoints(run: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every complete checkpoint of a run folder, oldest first."""
    named = [(re.fullmatch(r"step-(\d+)", folder.name), folder) for folder in run.glob("checkpoints/step-*")]
    return sorted((int(name[1]), folder) for name, folder in named if name)


def episode_record(trajectory: Trajectory) -> dict[str, Any]:
    """What episodes.jsonl says of an episode.

    Env id, kwargs, seed, options and the actions of the turns replay it. Ids in `context_ids` have loss mask 0, those
    in `token_ids` 1; where a turn has `new_segment`, another training sequence begins.
    """
    task, error = trajectory.task, trajectory.error
    return {
        "episode_id": trajectory.episode_id,
        "env_id": task.env_id,
        "kwargs": task.kwargs,
        "seed": task.seed,
        "options": task.options,
        "mixture": task.mixture,
        "stop_reason": str(trajectory.stop_reason),
        "reward": trajectory.reward,
        "rewards": trajectory.rewards,
        "reward_failures": trajectory.reward_failures,
        "reward_parts": dict(trajectory.reward_parts),
        "reward_turns": trajectory.reward_turns,
        "error": error
        and {"env_id": error.env_id, "turn": error.turn, "message": error.message, "traceback": error.traceback},
        "turns": [
            {
                "observation": turn.observation,
                "text": turn.text,
                "action": turn.action,
                "reward": turn.reward,
                "info": turn.info,
                "new_segment": turn.new_segment,
                "finish_reason": str(turn.completion.finish_reason),
                "context_ids": turn.context_ids,
                "token_ids": turn.completion.token_ids,
                "logprobs": turn.completion.logprobs,
                "versions": turn.completion.versions,
            }
            for turn in trajectory.turns
        ],
        "final_observation": trajectory.final_observation,
        "info": trajectory.info,
    }
