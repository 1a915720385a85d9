"""Groups are written in a thread of their own, and are there before what says that they are."""

import asyncio
import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from test_run_folder import begun, config
from train_cases import half_a, run, trainer

import relax_gym
from relax_gym.errors import RunFolderError
from relax_gym.lines import read_lines
from relax_gym.supervision import Supervisor
from relax_gym.supervision_config import SupervisionConfig
from relax_gym.testing import RecordingLearner
from relax_gym.types import Batch, Group
from relax_gym.writer import Writer

pickled_in: set[str] = set()


class Noted:
    """Notes in which threads it is pickled."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        pickled_in.add(threading.current_thread().name)
        return Noted, ()


class Leaves(relax_gym.Env):
    """Leaves such an object in its info."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return relax_gym.user("a or b?"), {}

    def step(self, action: str) -> Any:
        return relax_gym.StepResult([], float(action == "a"), True, False, {"object": Noted()})


if "test/Leaves-v0" not in relax_gym.list():
    relax_gym.register("test/Leaves-v0", Leaves)


def trained(run_dir: Path) -> list[int]:
    """The steps whose episodes are written by now."""
    return [line["step"] for line in read_lines(run_dir / "episodes.jsonl") if line["kind"] == "train"]


class Looks(RecordingLearner):
    """Notes of how many trained episodes its checkpoints find the lines."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__()
        self.run_dir = run_dir
        self.found: list[int] = []

    def save_state(self, folder: Path) -> None:
        self.found.append(len(trained(self.run_dir)))
        super().save_state(folder)


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_groups_are_written_in_a_thread_and_before_a_checkpoint(tmp_path: Path, max_staleness: int) -> None:
    learner, written_in = Looks(tmp_path / "run"), set()
    sections: dict[str, Any] = {"env": [{"id": "test/Leaves-v0"}], "checkpoint": {"every": 1}}
    loop = trainer(tmp_path, half_a, learner, train={"steps": 3, "max_staleness": max_staleness}, **sections)
    add_group = loop._folder.add_group

    def slowly(step: int, group: Group, *, kind: str) -> None:
        time.sleep(0.05)
        written_in.add(threading.current_thread().name)
        add_group(step, group, kind=kind)

    loop._folder.add_group = slowly  # type: ignore[method-assign]
    pickled_in.clear()
    metrics = run(loop).metrics
    assert (written_in, pickled_in) == ({"writer"}, {"writer"} if max_staleness else set())
    assert learner.found == [8, 16, 24]
    assert metrics["time/write"] >= 0


def test_a_run_ends_when_a_group_cannot_be_written_and_writes_none_after_it(tmp_path: Path) -> None:
    class Stops(RecordingLearner):
        def step(self, batch: Batch) -> dict[str, float]:
            steps.append(self.version)
            return super().step(batch)

    steps: list[int] = []
    loop = trainer(tmp_path, half_a, Stops(), train={"steps": 3})
    add_group = loop._folder.add_group

    def full(step: int, group: Group, *, kind: str) -> None:
        if group.slot in (2, 3):
            raise RunFolderError("no space left on device")
        add_group(step, group, kind=kind)

    loop._folder.add_group = full  # type: ignore[method-assign]
    with pytest.raises(BaseExceptionGroup) as caught:
        run(loop)
    assert caught.group_contains(RunFolderError, match="no space left")
    assert (steps, set(trained(tmp_path / "run"))) == ([0, 1], {1})
    assert [line["step"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")] == [1]


def test_what_cannot_be_written_keeps_no_other_group_from_being(tmp_path: Path) -> None:
    made: list[int] = []

    def note(number: int) -> None:
        if number == 1:
            raise ValueError("an env's object")
        made.append(number)

    async def main() -> None:
        writer = Writer(begun(config(tmp_path / "run")))
        for number in range(3):
            writer.post(note, number)
        with pytest.raises(ValueError, match="an env's object"):
            await writer.close()

    asyncio.run(main())
    assert made == [0, 2]


def test_the_episodes_of_an_evaluation_are_there_before_its_metrics(tmp_path: Path) -> None:
    found: list[tuple[int, list[int]]] = []
    loop = trainer(tmp_path, half_a, RecordingLearner(), train={"steps": 2}, eval={"episodes": 2, "every": 1})
    add_group, add_metrics = loop._folder.add_group, loop._folder.add_metrics

    def slowly(step: int, group: Group, *, kind: str) -> None:
        time.sleep(0.1)
        add_group(step, group, kind=kind)

    def look(step: int, metrics: Any) -> None:
        lines = read_lines(tmp_path / "run" / "episodes.jsonl")
        found.append((step, sorted({line["step"] for line in lines if line["kind"] == "eval"})))
        add_metrics(step, metrics)

    loop._folder.add_group, loop._folder.add_metrics = slowly, look  # type: ignore[method-assign]
    run(loop)
    assert found == [(0, [0]), (1, [0, 1]), (2, [0, 1, 2])]


def test_a_loop_that_is_late_is_warned_of_once_and_again_when_it_gets_worse(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor = Supervisor(SupervisionConfig(), tmp_path, dict)
    for seconds in (0.9, 1.2, 1.1, 2.0, 2.5, 2.4):
        supervisor._was_late(seconds)
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [text[:39] for text in warned] == [f"the event loop was late by {late} s, in wh" for late in (1.2, 2.5)]
    assert supervisor.last_lag() == 2.5
