"""Two processes never write one run folder; one that is gone, however it went, keeps nobody out."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from relax_gym.config import RunConfig, parse_config
from relax_gym.errors import ModelError, RunFolderError
from relax_gym.run_folder import RunFolder
from relax_gym.run_lock import run_lock
from relax_gym.train import train

HOLDER = """
import subprocess, sys
from pathlib import Path
from relax_gym.run_lock import run_lock
with run_lock(Path(sys.argv[1])):
    child = subprocess.Popen(["sleep", "60"])  # what a run starts does not hold its lock
    print(child.pid, flush=True)
    sys.stdin.read()
"""


@contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the lock; killed at the end."""
    command = [sys.executable, "-c", HOLDER, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            yield process
        finally:
            process.kill()
            os.kill(child, signal.SIGKILL)


def config(folder: Path) -> RunConfig:
    return parse_config(
        {
            "run_dir": str(folder),
            "model": {"name": str(folder / "no model")},
            "env": [{"id": "relax_gym/GuessNumber-v0"}],
            "train": {"steps": 2, "groups_per_step": 2, "group_size": 2},
        }
    )


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_that_a_live_process_writes_is_refused_until_that_is_killed(tmp_path: Path, resume: bool) -> None:
    if resume:
        RunFolder(config(tmp_path), resume=False).begin(0)
    with holder(tmp_path) as process:
        with pytest.raises(RunFolderError) as caught:
            train(config(tmp_path), resume=resume)
        assert str(caught.value) == (
            f"run folder {str(tmp_path)!r} is being written by process {process.pid} on {socket.gethostname()}; wait "
            "until that has ended, or end it (SIGTERM lets it save first), or choose another folder with "
            f"--set run_dir=...; relax-gym doctor {tmp_path} says what it does"
        )
        assert not (tmp_path / "run.log").exists()
        process.kill()
        process.wait()
        with pytest.raises(ModelError, match="no model"):  # it gets further now
            train(config(tmp_path), resume=resume)


def test_a_run_that_failed_lets_go(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(ModelError, match="no model"):
            train(config(tmp_path))
    with run_lock(tmp_path), pytest.raises(RunFolderError, match=f"process {os.getpid()} on"), run_lock(tmp_path):
        pass


def test_where_there_are_no_locks_the_run_goes_on_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with run_lock(tmp_path):
        assert "No locks available" in caplog.text
