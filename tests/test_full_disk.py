"""A disk that is full ends a run with one message that says so, and leaves what was written as it was."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_run_folder import begun, config, episode
from train_cases import half_a, run, trainer

from relax_gym.cleanup import Cleanup
from relax_gym.disk import write_atomically
from relax_gym.doctor import diagnose
from relax_gym.errors import RunFolderError, first_cause
from relax_gym.kept_groups import KeptGroups
from relax_gym.lines import read_lines
from relax_gym.run_log import log_file
from relax_gym.testing import RecordingLearner
from relax_gym.timeline import Timeline
from relax_gym.types import Group
from relax_gym.writer import Writer
from relax_gym_plugins.trackers.tensorboard import TensorBoardOptions, TensorBoardTracker

NO_SPACE = os.strerror(errno.ENOSPC)


@contextmanager
def no_room(size: int = 0) -> Iterator[None]:
    """No file can grow beyond `size`: writes fail half way, as on a full disk, but for the number of the error."""
    before, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


def full() -> OSError:
    return OSError(errno.ENOSPC, NO_SPACE)


@pytest.mark.parametrize("error", [full(), RuntimeError(f"Error while serializing: {NO_SPACE} (os error 28)")])
def test_a_checkpoint_that_does_not_fit_ends_the_run_with_its_cause_and_frees_its_room(
    tmp_path: Path, error: Exception
) -> None:
    class Fills(RecordingLearner):
        def save_state(self, folder: Path) -> Any:
            if self.version == 2:
                (folder / "half.bin").write_bytes(bytes(100))
                raise error
            return super().save_state(folder)

    with pytest.raises(BaseExceptionGroup) as caught:
        run(trainer(tmp_path, half_a, Fills(), checkpoint={"every": 1}))
    folder = tmp_path / "run"
    said = f"cannot write checkpoint '{folder}/checkpoints/step-000002': {NO_SPACE}; make room there, then go on with "
    cause = first_cause(caught.value)
    assert isinstance(cause, RunFolderError)
    assert str(cause) == f"{said}--resume"
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-000001"]
    assert (diagnose(folder).state, diagnose(folder).last_error) == ("failed", f"{said}--resume")


def test_a_checkpoint_that_fails_in_the_background_frees_its_room_and_keeps_its_own_error(tmp_path: Path) -> None:
    class Fails(RecordingLearner):
        def save_state(self, folder: Path) -> Any:
            super().save_state(folder)
            return lambda: [][1]

    with pytest.raises(BaseExceptionGroup) as caught:
        run(trainer(tmp_path, half_a, Fails(), checkpoint={"every": 1}))
    assert isinstance(first_cause(caught.value), IndexError)
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def test_an_error_of_a_library_that_is_about_the_disk_is_known_by_a_write(tmp_path: Path) -> None:
    folder = begun(config(tmp_path / "r"))
    with no_room(), pytest.raises(RunFolderError, match="step-000004': File too large; "), folder.writing_checkpoint(4):
        folder.begin_checkpoint(4)
        raise RuntimeError("unexpected pos 64 vs 0")


def test_a_line_that_does_not_fit_is_not_half_there(tmp_path: Path) -> None:
    folder = begun(config(tmp_path / "r"))
    group = Group(group_id="6", slot=6, trajectories=(episode(),))
    folder.add_metrics(1, {"x": 1.0})
    folder.add_group(1, group, kind="train")
    size = folder.episodes_path.stat().st_size
    with no_room(size + 100):
        with pytest.raises(RunFolderError, match=r"cannot write .*/episodes\.jsonl: File too large; .* --resume"):
            folder.add_group(2, group, kind="train")
        with pytest.raises(RunFolderError, match=r"cannot write .*/metrics\.jsonl"):
            folder.add_metrics(2, {"x" * 2 * size: 1.0})
    assert folder.episodes_path.stat().st_size == size
    folder.add_group(3, group, kind="queued")
    assert [line["step"] for line in read_lines(folder.episodes_path)] == [1, 3]


def test_what_cannot_be_replaced_stays_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text("before")
    with no_room(), pytest.raises(OSError, match="File too large"):
        write_atomically(tmp_path / "status.json", b"after")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("status.json", "before")]


def test_a_group_that_cannot_be_kept_and_a_start_are_explained(tmp_path: Path) -> None:
    folder = begun(config(tmp_path / "full"))

    async def keep() -> None:
        writer = Writer(folder)
        KeptGroups(writer, enabled=True).keep(Group(group_id="6", slot=6, trajectories=(episode(),)))
        await writer.close()

    queue = folder.path / "queue"
    with no_room(), pytest.raises(RunFolderError, match=f"cannot write {queue}: File too large; .* --resume"):
        asyncio.run(keep())
    assert list(queue.iterdir()) == []
    with no_room(), pytest.raises(RunFolderError, match=r"cannot write run folder .*, or choose another with --set"):
        begun(config(tmp_path / "r"))


def test_the_log_is_silent_when_it_cannot_be_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with no_room(), log_file(tmp_path / "run.log"):
        logging.getLogger("relax_gym").info("something")
    assert "Traceback" not in capfd.readouterr().err


def test_a_timeline_that_was_given_up_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        with Timeline(tmp_path, 1.0) as timeline:
            with no_room(200):
                timeline.add("step", 0, 1, process=1, row=1, args={"text": "x" * 300})
                timeline.flush()
            for _ in range(3):
                timeline.flush()

    asyncio.run(main())
    assert [path.name for path in tmp_path.iterdir()] == ["timeline.json"]
    assert caplog.text.count("which ends here") == 1


def test_a_tracker_that_cannot_write_says_where(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("no folder")
    context: Any = SimpleNamespace(run_dir=tmp_path, start_step=0)
    tracker = TensorBoardTracker(context, TensorBoardOptions())
    with pytest.raises(RunFolderError, match=f"cannot write {tmp_path}/tensorboard: .* --resume"):
        tracker.log(1, {"x": 1.0})


def test_what_fails_for_want_of_room_while_closing_has_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with Cleanup() as cleanup:
            cleanup.add(lambda: (_ for _ in ()).throw(full()))
            raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        asyncio.run(main())
    assert NO_SPACE in caplog.text
    assert "Traceback" not in caplog.text
