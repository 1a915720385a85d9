"""Decoders that misbehave; worker processes import them by name."""

from __future__ import annotations

import os
import time
from typing import Any

from relax_gym.media import Media
from relax_gym.media.decoding import Wanted, decode


def misbehaving(kind: Any, source: Any, wanted: Wanted) -> Media:
    """Decode what is no instruction: b"hang" never ends, b"crash" ends the process, b"fail" raises."""
    if source == b"hang":
        time.sleep(600)
    if source == b"crash":
        os._exit(11)
    if source == b"fail":
        raise RuntimeError("codec fell over")
    return decode(kind, source, wanted)


def counting(kind: Any, source: Any, wanted: Wanted) -> Media:
    """Decode a file, slowly, and add a line to the one beside it."""
    with open(f"{source}.log", "a", encoding="utf-8") as log:
        log.write(f"{os.getpid()}\n")
    time.sleep(0.2)
    return decode(kind, source, wanted)
