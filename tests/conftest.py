"""What holds for every test."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """A shell that starts pytest in the background makes it ignore Ctrl-C, and what tests start would inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
