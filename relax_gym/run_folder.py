"""The folder of one run: config, manifest, metrics, episodes, checkpoints. Everything in it is written atomically or
line by line, so a process killed at any moment leaves a folder that `--resume` continues."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import platform
import re
import shutil
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

from relax_gym.config import RunConfig, dump_config, read_toml, validate
from relax_gym.errors import RunFolderError
from relax_gym.media.files import MediaFolder
from relax_gym.media.items import Media
from relax_gym.plugins import plugins
from relax_gym.redaction import mask_text, masked
from relax_gym.types import Group, Trajectory

log = logging.getLogger("relax_gym")
MAY_CHANGE = {"run_dir", "threads", "eval", "checkpoint", "supervision", "timeline", "trackers"}
PACKAGES = ("relax-gym", "torch", "transformers", "gymnasium", "numpy", "tokenizers", "pydantic")
UNFINISHED = ".unfinished-"
RESULTS_FILE = "results.json"
"""Of an evaluation's folder, once it has played all."""
DEEPEST, LONGEST_INT = 50, 1024  # levels, bits


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
        with _explained(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass

    def begin(self, start_step: int) -> None:
        """The run starts after `start_step`: whatever could keep it from starting has gone well.

        Metrics and episodes of a resumed run that are later than that are forgotten; without a checkpoint, all are.

        Raises:
            RunFolderError: as above; another process may have come first.
        """
        check_run_folder(self._config, resume=self._resume)
        if self._resume:
            self._note_other_steps()
        with _explained(self.path):
            if not self._resume:
                write_atomically(
                    self.path / "manifest.json", json.dumps(self._manifest(), indent=2, default=str).encode()
                )
            write_atomically(
                self._config_path, dump_config(self._config).encode()
            )  # last: it is what makes this a run folder
            self.truncate(start_step or -1)

    def _note_other_steps(self) -> None:
        before, now = _kept(self._config_path).train.steps, self._config.train.steps
        if before != now:
            log.info(
                "train.steps was %d and is %d: a learning-rate schedule over all steps goes on as one over %d",
                before,
                now,
                now,
            )

    def _manifest(self) -> dict[str, Any]:
        return {
            "run_id": uuid.uuid4().hex,
            "seed": self._config.seed,
            "command": [mask_text(self._config, part) for part in (Path(sys.argv[0]).name, *sys.argv[1:])],
            "python": platform.python_version(),
            "platform": platform.platform(),
            "packages": {name: version(name) for name in PACKAGES},
            "plugins": {name: source for name, source in plugins().sources.items() if source != "relax-gym"},
            "environments": [{"id": env.id, "kwargs": env.kwargs, "weight": env.weight} for env in self._config.env],
        }

    # Lines -----------------------------------------------------------------------------------------------------------

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line to metrics.jsonl."""
        append_line(self.metrics_path, {"step": step, **metrics})

    def add_group(self, step: int, group: Group, *, kind: str) -> None:
        """Append the group's episodes to episodes.jsonl.

        `kind` is train, eval, the reason it was dropped, or queued: finished, but the run ended before its step.
        """
        where = {"step": step, "kind": kind, "group_id": group.group_id, "slot": group.slot, "attempt": group.attempt}
        for trajectory in group.trajectories:
            append_line(self.episodes_path, {**where, **episode_record(trajectory)}, self._media.keep)

    def truncate(self, step: int) -> None:
        """Forget metrics and episodes later than `step`: they will be made again."""
        keep_lines(self.metrics_path, lambda line: line["step"] <= step)
        keep_lines(self.episodes_path, lambda line: line["step"] <= step)

    def close(self) -> None:
        """Wait for the media that are still being written. Idempotent."""
        self._media.close()

    # Checkpoints -----------------------------------------------------------------------------------------------------

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
    with _explained(path):
        begun = (path / "config.toml").exists()
        existing = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
        if not existing.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(existing, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    if resume:
        _check_same_run(config, path)
    elif begun:
        raise RunFolderError(
            f"run folder {str(path)!r} already holds a run; continue it with --resume, or choose another with "
            f"--set run_dir=..., or delete it"
        )


def _check_same_run(config: RunConfig, path: Path) -> None:
    if not (path / "config.toml").exists():
        raise RunFolderError(f"nothing to resume: {str(path)!r} holds no run; leave out --resume to start one")
    old, new = _kept(path / "config.toml").model_dump(mode="json"), masked(config)
    for section, key in (("train", "steps"), ("media", "keep_gib")):
        old[section].pop(key), new[section].pop(key)
    for key in plugins().get("learner", config.learner.name).load_options().may_change:
        old["learner"].pop(key, None), new["learner"].pop(key, None)
    changed = [key for key in new if key not in MAY_CHANGE and old[key] != new[key]]
    if changed:
        lines = "; ".join(f"{key}: {old[key]} there, {new[key]} here" for key in changed)
        raise RunFolderError(f"{str(path)!r} holds another run ({lines}); resume it with its own config")


def _kept(path: Path) -> RunConfig:
    """The config that a run folder keeps. Plugins do not check it: they might refuse the masks of their secrets."""
    return validate(RunConfig, read_toml(path), source=str(path))


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunFolderError(
            f"cannot write run folder {str(path)!r}: {error.strerror or error}; choose another with --set run_dir=..."
        ) from error


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


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a .jsonl file. A last line cut short by a kill is left out.

    Raises:
        RunFolderError: another line is broken; names it.
    """
    return [record for _, record in lines_of(path)]


def lines_of(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Each line of a .jsonl file, and the record that it is, read as they are asked for; otherwise as `read_lines`."""
    if not path.exists():
        return
    broken: tuple[int, ValueError] | None = None
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            if broken is not None:  # and not the last one
                at, error = broken
                raise RunFolderError(f"{path}, line {at} is not JSON: {error}; repair or delete that line") from error
            try:
                record = json.loads(line)
            except ValueError as error:
                broken = number, error
            else:
                yield line.removesuffix(b"\n") + b"\n", record


def append_line(path: Path, record: Mapping[str, Any], keep: Callable[[Media], Any] = repr) -> None:
    """Append a record to a .jsonl file; of media, what `keep` says."""
    line = json_text(record, keep) + "\n"
    with path.open("ab") as file:
        file.write(line.encode("utf-8", "backslashreplace"))  # UTF-8 has no lone surrogate; JSON has: \udc80


def json_text(record: Mapping[str, Any], keep: Callable[[Media], Any] = repr) -> str:
    """A record as one line of JSON; of media, what `keep` says."""
    return json.dumps(_plain(record, keep), ensure_ascii=False)


def _plain(value: Any, keep: Callable[[Media], Any], depth: int = 0) -> Any:
    """What JSON can say; of media, what `keep` says. The rest (an array, an object of the env) is named, not dumped."""
    if isinstance(value, Mapping) and depth < DEEPEST:
        return {str(key): _plain(item, keep, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and depth < DEEPEST:
        if _all_numbers(value):
            return value
        return [_plain(item, keep, depth + 1) for item in value]
    if isinstance(value, Media):
        return keep(value)
    if hasattr(value, "item") and getattr(value, "size", None) == 1:
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str) or (isinstance(value, int) and value.bit_length() <= LONGEST_INT):
        return value
    return f"<{type(value).__name__}>"


def _all_numbers(values: list[Any] | tuple[Any, ...]) -> bool:
    """Whether JSON can say them as they are. Quick: a group has hundreds of thousands."""
    kinds = set(map(type, values))
    if kinds == {int}:
        return max(map(int.bit_length, values)) <= LONGEST_INT
    return kinds == {float} and all(map(math.isfinite, values))


def keep_lines(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> None:
    """Forget the records that are not wanted, and a last line that was cut short."""
    if path.exists():
        with replacing(path) as file:
            file.writelines(line for line, record in lines_of(path) if wanted(record))


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file in one rename."""
    with replacing(path) as file:
        file.write(content)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """What is written to the file takes the place of another, in one rename at the end."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        yield file
    os.replace(partial, path)
