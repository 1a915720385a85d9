"""`run.log` of a run folder: what the processes of a run said, one after the other."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

log = logging.getLogger("relax_gym")
BEGINS = "this process begins to write the log: "
_ERROR_LINE = re.compile(r"^\S+ \S+ (?:ERROR|CRITICAL|WARNING) (.*)$", re.M)
_READ = 2**22
"""Most bytes of a log that are searched, from its end."""


class _LogFile(logging.FileHandler):
    """On a full disk it is silent: what ends a run for want of room says so, a line of the log need not."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)

    def close(self) -> None:
        with suppress(OSError):
            super().close()


@contextmanager
def log_file(path: Path) -> Iterator[None]:
    """What happens meanwhile is appended to the file, notes (INFO) included, after a line that says whose it is."""
    handler = _LogFile(path, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    level = log.level
    log.addHandler(handler)
    log.setLevel(min(log.getEffectiveLevel(), logging.INFO))
    try:
        log.info("%s%d", BEGINS, os.getpid())
        yield
    finally:
        log.setLevel(level)
        log.removeHandler(handler)
        handler.close()


def last_error(path: Path) -> str | None:
    """The last line that reports a fault of the last process that wrote the log."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _READ))
            text = file.read().decode(errors="replace")
    except OSError:
        return None
    found = _ERROR_LINE.findall(text.rpartition(f" INFO {BEGINS}")[2])
    return str(found[-1]) if found else None
