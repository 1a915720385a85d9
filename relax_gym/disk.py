"""Files that are written whole or not at all; and what cannot be written, said so that it can be put right."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from relax_gym.errors import RunFolderError

OR_ANOTHER, THEN_RESUME = "or choose another with --set run_dir=...", "then go on with --resume"
FULL = (errno.ENOSPC, errno.EDQUOT)
PROBE = 2**16  # bytes


@contextmanager
def explained(what: str, then: str) -> Iterator[None]:
    """Raise RunFolderError where the block raises OSError: `what` cannot be written, and what to do, at last `then`."""
    try:
        yield
    except OSError as error:
        cure = "make room there" if error.errno in FULL else "put that right"
        raise RunFolderError(f"cannot write {what}: {error.strerror or error}; {cure}, {then}") from error


def no_room(error: Exception, folder: Path) -> OSError | None:
    """The lack of room that an error of a library is about, if it is."""
    if os.strerror(errno.ENOSPC) in str(error):  # what it had written it may have removed
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    try:
        probe(folder)
    except OSError as full:
        return full
    return None


def probe(folder: Path) -> None:
    """Raise OSError when nothing can be written to a folder."""
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        file.write(bytes(PROBE))


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file in one rename."""
    with replacing(path) as file:
        file.write(content)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """What is written to the file takes the place of another, in one rename at the end."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("wb") as file:
            yield file
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
