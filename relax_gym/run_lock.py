"""A run folder has one process that writes it."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from relax_gym.errors import RunFolderError

log = logging.getLogger("relax_gym")
LOCK_FILE = "lock"


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Within the block no other process is in it for the same folder, which exists.

    The kernel holds the lock for this process and drops it however the process ends; what the file says only names the
    holder. Where the file system has no locks, the block is run without one, which is logged.

    Raises:
        RunFolderError: a live process has it; names it.
    """
    with (folder / LOCK_FILE).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunFolderError(_refusal(folder, file.name)) from None
        except OSError as error:
            log.warning("cannot lock %s (%s): see to it that no other process writes this run", file.name, error)
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
        file.flush()
        yield


def _refusal(folder: Path, file: str) -> str:
    try:
        holder = json.loads(Path(file).read_text())
        who = f"process {holder['pid']} on {holder['host']}"
    except (OSError, ValueError, KeyError):  # it is just about to write that
        who = "another process"
    return (
        f"run folder {str(folder)!r} is being written by {who}; wait until that has ended, or end it (SIGTERM lets it "
        f"save first), or choose another folder with --set run_dir=...; relax-gym doctor {folder} says what it does"
    )
