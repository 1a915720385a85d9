"""Fixtures of tests of distillation in the torch learner; a file has them by `pytest_plugins`."""

from __future__ import annotations

import pytest
from distillation_kit import GPT2
from learner_cases import context, qwen3, save_model


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """A student and two teachers, folders of the same vocabulary."""
    root = tmp_path_factory.mktemp("models")
    made = {name: save_model(root / name, GPT2, seed) for name, seed in [("student", 0), ("t1", 1), ("t2", 2)]}
    made["qwen"] = save_model(root / "qwen", qwen3(), 3)
    for folder in made.values():
        context(folder).tokenizer.save_pretrained(folder)
    return made
