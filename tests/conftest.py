"""What holds for every test."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


def pytest_configure() -> None:
    """A shell that starts pytest in the background makes it ignore Ctrl-C, and what tests start would inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny tensors are many times slower on several threads than on one."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


LONGEST = ("test_readme.py", "test_media_learns.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes minutes begins first, so that two workers end together."""
    items.sort(key=lambda item: item.path.name not in LONGEST)
