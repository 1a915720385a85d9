"""Groups that are kept for a run that goes on: no longer than it can use them, and whatever an env leaves in them."""

import ctypes
import pickle
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from train_cases import TOKENIZER, half_a, run, trainer

import relax_gym
from relax_gym.kept_groups import newest_version
from relax_gym.lines import read_lines
from relax_gym.run_folder import list_checkpoints
from relax_gym.testing import RecordingLearner, ScriptedSampler
from relax_gym.types import Batch


class Unloadable(Exception):
    """Is pickled, and cannot be made again."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def nested() -> Any:
    value: Any = None
    for _ in range(100_000):
        value = [value]
    return value


OBJECTS = {
    "pointer": lambda: ctypes.pointer(ctypes.c_int(3)),
    "nested": nested,
    "error": lambda: Unloadable(404, "gone"),
}


class Keepsakes(relax_gym.Env):
    """Leaves an object in its info."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return relax_gym.user("a or b?"), {}

    def step(self, action: str) -> Any:
        return relax_gym.StepResult([], float(action == "a"), True, False, {"object": OBJECTS[self.kind]()})


if "test/Keepsakes-v0" not in relax_gym.list():
    relax_gym.register("test/Keepsakes-v0", Keepsakes)


class Ends(RecordingLearner):
    """Fails in a step, once groups have been finished before it."""

    def __init__(self, at: int, *, queued: int = 0) -> None:
        super().__init__()
        self.at, self.queued = at, queued
        self.loop: Any = None

    def step(self, batch: Batch) -> dict[str, float]:
        if self.version == self.at:
            while self.loop._queue.queued < self.queued:
                time.sleep(0.001)
            raise RuntimeError("the end")
        return super().step(batch)


def until(at: int, loop: Any) -> None:
    loop._learner.loop = loop
    with pytest.raises(BaseExceptionGroup) as caught:
        run(loop)
    assert caught.group_contains(RuntimeError, match="the end")
    assert loop._learner.version == at


def kept(folder: Path) -> dict[int, int]:
    """Slot and newest version of each group there."""
    groups = [pickle.loads(path.read_bytes()) for path in (folder / "run" / "queue").glob("*.pickle")]
    return {group.slot: newest_version(group) for group in groups}


@pytest.mark.parametrize("every", [0, 5])
def test_no_more_groups_are_kept_than_a_run_that_goes_on_can_use(every: int, tmp_path: Path) -> None:
    until(19, trainer(tmp_path, half_a, Ends(19), train={"steps": 30, "max_staleness": 1}, checkpoint={"every": every}))
    saved = 15 if every else 0
    trained = {slot: version for slot, version in kept(tmp_path).items() if slot < 20 * 2}
    assert all(version <= saved for version in trained.values())
    assert len(kept(tmp_path)) <= 2 * 2 * 2  # what is under way, and what was at the checkpoint


@pytest.mark.parametrize("kind", OBJECTS)
def test_groups_that_cannot_be_kept_or_read_are_sampled_again(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sections: dict[str, Any] = {
        "env": [{"id": "test/Keepsakes-v0", "kwargs": {"kind": kind}}],
        "train": {"steps": 4, "max_staleness": 1},
        "checkpoint": {"every": 1},
    }
    until(2, trainer(tmp_path, half_a, Ends(2, queued=2), **sections))
    run(trainer(tmp_path, half_a, resume=True, **sections))
    assert "cannot be " in caplog.text
    lines = read_lines(tmp_path / "run" / "episodes.jsonl")
    trained = [line["slot"] for line in lines if line["kind"] == "train"]
    assert sorted(set(trained)) == list(range(8))
    assert not list((tmp_path / "run" / "queue").glob("*"))


class Small(ScriptedSampler):
    """Has memory for one group at a time."""

    capacity = 1


def test_groups_of_lost_weights_are_not_trained_on_by_a_later_run_either(tmp_path: Path) -> None:
    """The second run does not come to their slots, and the third one's weights have their version's number."""
    sections: dict[str, Any] = {
        "train": {"steps": 14, "max_staleness": 4, "group_size": 2},
        "checkpoint": {"every": 1, "keep": 99},
    }
    until(5, trainer(tmp_path, half_a, Ends(5, queued=8), **sections))
    for step, folder in list_checkpoints(tmp_path / "run"):
        if step > 2:
            shutil.rmtree(folder)
    files = {slot: tmp_path / "run" / "queue" / f"{slot}.pickle" for slot, v in kept(tmp_path).items() if v > 2}
    written = {slot: file.stat().st_mtime_ns for slot, file in files.items()}
    assert written
    small = Small(half_a, tokenizer=TOKENIZER)
    until(4, trainer(tmp_path, None, Ends(4), resume=True, sampler=small, **sections))
    assert not [slot for slot, file in files.items() if file.exists() and file.stat().st_mtime_ns == written[slot]]
    run(trainer(tmp_path, half_a, resume=True, **sections))
    lines = read_lines(tmp_path / "run" / "episodes.jsonl")
    assert sorted({line["slot"] for line in lines if line["kind"] == "train"}) == list(range(28))
