"""Fixtures of tests that send weights to fake servers; a file has them by `pytest_plugins`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def ports() -> Iterator[list[int]]:
    """Of three fake servers, and of one that is older."""
    script = Path(__file__).with_name("fake_sglang_weights.py")
    command = [sys.executable, str(script), "new", "new", "new", "old"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())
        os.killpg(process.pid, signal.SIGKILL)
