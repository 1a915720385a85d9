"""Checkpoints that a learner goes on writing while the next step runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from train_cases import half_a, run, trainer

from relax_gym.errors import TrainingError
from relax_gym.hookspecs import hookimpl
from relax_gym.plugins import plugins
from relax_gym.testing import RecordingLearner
from relax_gym.types import Batch


class Slow(RecordingLearner):
    """Writes its state only when somebody waits for it."""

    exports_checkpoints = False

    def __init__(self, fails: int = 0) -> None:
        super().__init__()
        self.fails = fails
        self.log: list[str] = []

    def step(self, batch: Batch) -> dict[str, float]:
        self.log.append(f"step {self.version + 1}")
        return super().step(batch)

    def save_state(self, folder: Path) -> Callable[[], None]:
        version = self.version
        self.log.append(f"begin {version}")

        def wait() -> None:
            assert threading.current_thread().name == "learner"
            if version == self.fails:
                raise TrainingError("rank 1 cannot write")
            (folder / "state").write_text(str(version))
            self.log.append(f"wait {version}")

        return wait

    def close(self) -> None:
        self.log.append("close")


class Seen:
    def __init__(self, learner: Slow) -> None:
        self.learner = learner

    @hookimpl
    def on_checkpoint(self, step: int, folder: Path) -> None:
        assert (folder / "state").read_text() == str(step)
        self.learner.log.append(f"there {step}")


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "run" / "checkpoints").glob("*"))


@pytest.fixture
def seen() -> Any:
    made: list[Seen] = []

    def see(learner: Slow) -> Slow:
        made.append(Seen(learner))
        plugins().manager.register(made[-1])
        return learner

    yield see
    for one in made:
        plugins().manager.unregister(one)


def test_a_checkpoint_is_there_after_the_next_step_and_the_last_before_the_end(tmp_path: Path, seen: Any) -> None:
    learner = seen(Slow())
    run(trainer(tmp_path, half_a, learner, train={"steps": 4}, checkpoint={"every": 2, "keep": 5}))
    first = ["step 1", "step 2", "begin 2", "step 3", "wait 2", "there 2"]
    assert learner.log == [*first, "step 4", "begin 4", "wait 4", "there 4", "close"]
    assert steps(tmp_path) == ["step-000002", "step-000004"]
    assert not list((tmp_path / "run").glob("checkpoints/*/recording_learner.json"))  # no export


def test_a_failure_of_the_writing_ends_the_next_step(tmp_path: Path, seen: Any) -> None:
    learner = seen(Slow(fails=2))
    loop = trainer(tmp_path, half_a, learner, train={"steps": 5}, checkpoint={"every": 1})
    with pytest.raises((TrainingError, ExceptionGroup)) as caught:
        run(loop)
    errors = caught.value.exceptions if isinstance(caught.value, ExceptionGroup) else [caught.value]
    assert [str(error) for error in errors] == ["rank 1 cannot write"]
    assert learner.log[-3:] == ["begin 2", "step 3", "close"]
    assert steps(tmp_path) == ["step-000001"]


@pytest.mark.parametrize("interrupted", [True, False])
def test_what_is_being_written_when_a_run_ends_is_finished(interrupted: bool, tmp_path: Path, seen: Any) -> None:
    reached = threading.Event()

    class Ends(Slow):
        def step(self, batch: Batch) -> dict[str, float]:
            if self.version == 2 and not interrupted:
                raise TrainingError("loss is nan")
            if self.version == 2:
                reached.set()
            return super().step(batch)

    learner = seen(Ends())
    loop = trainer(tmp_path, half_a, learner, train={"steps": 900}, checkpoint={"every": 2})

    async def main() -> None:
        running = asyncio.create_task(loop.run())
        if interrupted:
            await asyncio.to_thread(reached.wait, 10)
            running.cancel()
        await running

    with pytest.raises((asyncio.CancelledError, TrainingError, ExceptionGroup)):
        asyncio.run(main())
    assert learner.log[:3] == ["step 1", "step 2", "begin 2"]
    told = [] if interrupted else ["there 2"]  # an interrupted loop has nobody left to tell
    assert [entry for entry in learner.log[3:] if not interrupted or entry[:5] not in ("step ", "there")] == [
        *("wait 2", *told, "close")
    ]
    assert steps(tmp_path) == ["step-000002"]
