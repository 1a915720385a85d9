"""The folder of one run: config, manifest, metrics, episodes, checkpoints. Everything in it is written atomically or
line by line, so a process killed at any moment leaves a folder that `--resume` continues."""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import sys
import uuid
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from relax_gym.config import RunConfig, dump_config, load_config
from relax_gym.errors import RunFolderError
from relax_gym.types import Group, Trajectory

MAY_CHANGE = {"run_dir", "threads", "eval", "checkpoint", "trackers"}
PACKAGES = ("relax-gym", "torch", "transformers", "gymnasium", "numpy", "tokenizers", "pydantic")


class RunFolder:
    """Creates or reopens the folder.

    Raises:
        RunFolderError: it cannot be written, holds a run already, or (resuming) holds another run or none.
    """

    def __init__(self, config: RunConfig, *, resume: bool) -> None:
        self.path = Path(config.run_dir)
        self.metrics_path = self.path / "metrics.jsonl"
        self.episodes_path = self.path / "episodes.jsonl"
        self._checkpoints = self.path / "checkpoints"
        config_path = self.path / "config.toml"
        if resume:
            self._check_same_run(config, config_path)
        elif config_path.exists():
            raise RunFolderError(
                f"run folder {str(self.path)!r} already holds a run; continue it with --resume, or choose another with "
                f"--set run_dir=..., or delete it"
            )
        try:
            self._checkpoints.mkdir(parents=True, exist_ok=True)
            config_path.write_text(dump_config(config), encoding="utf-8")
            if not resume:
                self._write_manifest(config)
        except OSError as error:
            raise RunFolderError(
                f"cannot write run folder {str(self.path)!r}: {error.strerror or error}; "
                "choose another with --set run_dir=..."
            ) from error

    def _write_manifest(self, config: RunConfig) -> None:
        manifest = {
            "run_id": uuid.uuid4().hex,
            "seed": config.seed,
            "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
            "python": platform.python_version(),
            "platform": platform.platform(),
            "packages": {name: version(name) for name in PACKAGES},
            "environments": [{"id": env.id, "kwargs": env.kwargs, "weight": env.weight} for env in config.env],
        }
        (self.path / "manifest.json").write_text(json.dumps(manifest, indent=2, default=str), encoding="utf-8")

    def _check_same_run(self, config: RunConfig, config_path: Path) -> None:
        if not config_path.exists():
            raise RunFolderError(f"nothing to resume: {str(self.path)!r} holds no run; leave out --resume to start one")
        old = load_config(config_path).model_dump(mode="json")
        new = config.model_dump(mode="json")
        old["train"].pop("steps"), new["train"].pop("steps")
        changed = [key for key in new if key not in MAY_CHANGE and old[key] != new[key]]
        if changed:
            lines = "; ".join(f"{key}: {old[key]} there, {new[key]} here" for key in changed)
            raise RunFolderError(f"{str(self.path)!r} holds another run ({lines}); resume it with its own config")

    # Lines -----------------------------------------------------------------------------------------------------------

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line to metrics.jsonl."""
        _append(self.metrics_path, {"step": step, **metrics})

    def add_group(self, step: int, group: Group, *, kind: str) -> None:
        """Append the group's episodes to episodes.jsonl. `kind` is train, eval or the reason it was dropped."""
        for trajectory in group.trajectories:
            _append(self.episodes_path, {"step": step, "kind": kind, **episode_record(trajectory)})

    def truncate(self, step: int) -> None:
        """Forget metrics and episodes later than `step`: they will be made again."""
        _keep_lines(self.metrics_path, lambda line: line["step"] <= step)
        _keep_lines(self.episodes_path, lambda line: line["step"] <= step)

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def save_checkpoint(self, step: int, write: Callable[[Path], None], *, keep: int) -> Path:
        """Let `write` fill a folder, then make it the checkpoint of `step` in one rename; keep the newest `keep`."""
        final = self._checkpoints / f"step-{step:06d}"
        unfinished = self._checkpoints / f".unfinished-{step:06d}"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        write(unfinished)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(unfinished, final)
        for _, old in self.checkpoints()[:-keep]:
            shutil.rmtree(old)
        return final

    def checkpoints(self) -> list[tuple[int, Path]]:
        """(step, folder) of every complete checkpoint, oldest first."""
        return list_checkpoints(self.path)


def list_checkpoints(run: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every complete checkpoint of a run folder, oldest first."""
    return sorted((int(folder.name.removeprefix("step-")), folder) for folder in run.glob("checkpoints/step-*"))


def episode_record(trajectory: Trajectory) -> dict[str, Any]:
    """One line of episodes.jsonl. Ids in `context_ids` have loss mask 0, those in `token_ids` 1."""
    error = trajectory.error
    return {
        "episode_id": trajectory.episode_id,
        "env_id": trajectory.task.env_id,
        "seed": trajectory.task.seed,
        "stop_reason": str(trajectory.stop_reason),
        "reward": trajectory.reward,
        "rewards": dict(trajectory.rewards),
        "reward_failures": dict(trajectory.reward_failures),
        "reward_parts": dict(trajectory.reward_parts),
        "error": error
        and {"env_id": error.env_id, "turn": error.turn, "message": error.message, "traceback": error.traceback},
        "turns": [
            {
                "observation": list(turn.observation),
                "text": turn.text,
                "action": turn.action,
                "reward": turn.reward,
                "info": dict(turn.info),
                "new_segment": turn.new_segment,
                "finish_reason": str(turn.completion.finish_reason),
                "context_ids": list(turn.context_ids),
                "token_ids": list(turn.completion.token_ids),
                "logprobs": list(turn.completion.logprobs),
                "versions": list(turn.completion.versions),
            }
            for turn in trajectory.turns
        ],
        "final_observation": list(trajectory.final_observation),
    }


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a .jsonl file. A last line cut short by a kill is left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").split("\n"):
        if not line:
            continue
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def _append(path: Path, record: Mapping[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(_finite(record), ensure_ascii=False, default=_describe) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def _describe(value: Any) -> Any:
    """What is not JSON (an image, an array, an object of the env) is named, not dumped."""
    if hasattr(value, "item") and getattr(value, "size", None) == 1:
        return value.item()
    return f"<{type(value).__name__}>"


def _keep_lines(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> None:
    if not path.exists():
        return
    partial = path.with_suffix(".partial")
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in read_lines(path) if wanted(record)]
    partial.write_text("".join(lines), encoding="utf-8")
    os.replace(partial, path)
