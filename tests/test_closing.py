"""What was built before a start fails is closed, last first; the failure is what is raised."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from train_cases import OneOrTwo

from relax_gym.build import build_parts
from relax_gym.cleanup import closed_on_failure
from relax_gym.config import Options, RunConfig, parse_config
from relax_gym.errors import ConfigError, ModelError, SamplerError
from relax_gym.evaluate import evaluate_run
from relax_gym.plugins import plugins
from relax_gym.registry import Component
from relax_gym.testing import ScriptedSampler, tiny_tokenizer
from relax_gym.train import train

assert OneOrTwo  # registers test/OneOrTwo-v0
closed: list[str] = []


class NamedOptions(Options):
    """How a part is called, and whether it can be built."""

    label: str = "part"
    breaks: bool = False


class Part:
    """A tracker or learner that says when it is closed."""

    def __init__(self, context: object, options: NamedOptions) -> None:
        if options.breaks:
            raise KeyboardInterrupt
        self.label = options.label

    def close(self) -> None:
        closed.append(self.label)


class Judge:
    """A reward that says when it is closed."""

    def __init__(self, label: str, breaks: bool = False) -> None:
        if breaks:
            raise ValueError("no such judge")
        self.label = label

    def __call__(self, trajectory: object) -> float:
        return 0.0

    async def close(self) -> None:
        closed.append(self.label)


class OtherJudge(Judge):
    """The same under another name."""


class BadSampler(ScriptedSampler):
    """Cannot start."""

    def __init__(self, context: object, options: object) -> None:
        super().__init__([], tokenizer=tiny_tokenizer())

    async def start(self) -> None:
        raise SamplerError("no port")

    async def aclose(self) -> None:
        closed.append("sampler")


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    tables = plugins().tables
    tables["reward"].add("test_closing_judge", Judge, "test")
    tables["reward"].add("test_other_judge", OtherJudge, "test")
    tables["sampler"].add("test_bad", Component(factory=BadSampler, options=Options), "test")
    tables["tracker"].add("test_part", Component(factory=Part, options=NamedOptions), "test")
    tables["learner"].add("test_part", Component(factory=Part, options=NamedOptions), "test")


def config(tmp_path: Path, **sections: Any) -> RunConfig:
    closed.clear()
    return parse_config(
        {
            "run_dir": str(tmp_path / "run"),
            "model": {"name": "tiny-qwen3"},
            "env": [{"id": "test/OneOrTwo-v0"}],
            "reward": [{"name": "test_closing_judge", "kwargs": {"label": "judge"}}],
            "sampler": {"name": "test_bad"},
            "learner": {"name": "test_part", "label": "learner"},
            "trackers": [{"name": "test_part", "label": "first"}, {"name": "test_part", "label": "second"}],
            "train": {"steps": 1, "groups_per_step": 1, "group_size": 2},
            "eval": {"episodes": 1},
            **sections,
        }
    )


def test_rewards_are_closed_when_the_next_of_them_or_the_model_cannot_be_built(tmp_path: Path) -> None:
    given = config(tmp_path, model={"name": str(tmp_path / "missing")})
    with pytest.raises(ModelError, match="does not exist"):
        build_parts(given)
    assert closed == ["judge"]
    broken = {"name": "test_other_judge", "kwargs": {"label": "other", "breaks": True}}
    given = config(tmp_path, reward=[{"name": "test_closing_judge", "kwargs": {"label": "judge"}}, broken])
    with pytest.raises(ConfigError, match="no such judge"):
        build_parts(given)
    assert closed == ["judge"]


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        (
            {"trackers": [{"name": "test_part", "label": "first"}, {"name": "test_part", "breaks": True}]},
            ["first", "sampler", "judge"],
        ),
        ({"learner": {"name": "test_part", "breaks": True}}, ["second", "first", "sampler", "judge"]),
    ],
)
def test_all_parts_are_closed_when_a_tracker_or_the_learner_cannot_be_built(
    tmp_path: Path, sections: dict[str, Any], expected: list[str]
) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(config(tmp_path, **sections))
    assert closed == expected


def test_all_parts_are_closed_once_when_the_sampler_cannot_start(tmp_path: Path) -> None:
    with pytest.raises(SamplerError, match="no port"):
        train(config(tmp_path))
    assert sorted(closed) == ["first", "judge", "learner", "sampler", "second"]


def test_an_evaluation_whose_sampler_cannot_start_closes_it_and_the_rewards(tmp_path: Path) -> None:
    with pytest.raises(SamplerError, match="no port"):
        evaluate_run(config(tmp_path))
    assert closed == ["judge", "sampler"]


def test_what_cannot_be_closed_is_logged_and_the_rest_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    closed.clear()
    with pytest.raises(ValueError, match="first"), closed_on_failure() as built:
        built.add(lambda: closed.append("a"))
        built.add(lambda: 1 / 0)
        raise ValueError("first")
    assert closed == ["a"]
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
