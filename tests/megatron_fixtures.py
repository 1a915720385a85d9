"""Fixtures of tests that hold the Megatron learner to the torch learner; a file has them by `pytest_plugins`."""

from __future__ import annotations

import pytest
from megatron_learner_kit import Case, Expected, Folders, Outcome, by_torch


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def expected(folders: Folders) -> Expected:
    """What the torch learner finds, computed once."""
    known: dict[tuple[str, int], Outcome] = {}

    def find(model: str, case: Case) -> Outcome:
        key = model, id(case)
        known[key] = known.get(key) or by_torch(folders[model], case)
        return known[key]

    return find
