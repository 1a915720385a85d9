"""What happens in a run, in `run.log` of its folder."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger("relax_gym")


@contextmanager
def log_file(path: Path) -> Iterator[None]:
    """What happens meanwhile is appended to the file, notes (INFO) included."""
    handler = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    level = log.level
    log.addHandler(handler)
    log.setLevel(min(log.getEffectiveLevel(), logging.INFO))
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeHandler(handler)
        handler.close()
