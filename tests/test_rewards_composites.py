"""Rewards made of rewards: what counts, what is asked, what is logged, what is refused; and rewards by dotted path."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from reward_kit import episode

from relax_gym.build import build_rewards
from relax_gym.config import RewardConfig, RolloutConfig, RunConfig
from relax_gym.errors import ConfigError, PluginError, RelaxGymError
from relax_gym.plugins import plugins
from relax_gym.scoring import close_rewards, score
from relax_gym.types import Trajectory

PATH = f"python:{__name__}:"


class Fixed:
    def __init__(self, *, value: float | None = None) -> None:
        self.value = value

    def __call__(self, trajectory: Trajectory) -> float | None:
        return self.value


class Other(Fixed):
    pass


class Never(Fixed):
    def __call__(self, trajectory: Trajectory) -> float:
        raise AssertionError("asked")


def term(kind: type[Fixed], value: float | None = None, **more: Any) -> dict[str, Any]:
    return {"name": PATH + kind.__name__, "kwargs": {} if value is None else {"value": value}, **more}


def ask(name: str, *rewards: dict[str, Any], **options: Any) -> Trajectory:
    section = RewardConfig(name=name, kwargs={"rewards": list(rewards), **options})
    terms = build_rewards(RunConfig.model_construct(reward=(section,), rollout=RolloutConfig()))

    async def asked() -> Trajectory:
        try:
            return await score(episode("x"), terms, timeout=30)
        finally:
            await close_rewards(terms, timeout=30)

    return asyncio.run(asked())


@pytest.mark.parametrize(
    ("name", "rewards", "expected"),
    [
        ("weighted_sum", [term(Fixed, 1.0, weight=0.5), term(Other, 3.0)], 3.5),
        ("product", [term(Fixed, 0.5), term(Other, 3.0, weight=2.0)], 3.0),
        ("gate", [term(Fixed, 1.0), term(Other, 0.25)], 0.25),
        ("gate", [term(Fixed, 0.9), term(Never)], 0.0),
        ("first_failure", [term(Fixed, 1.0), term(Other, 0.25)], 0.25),
        ("first_failure", [term(Fixed, 0.9), term(Never)], 0.9),
        ("weighted_sum", [term(Fixed, 1.0), {"name": "product", "kwargs": {"rewards": [term(Other, 4.0)]}}], 5.0),
        ("product", [term(Fixed, 0.0), term(Other)], None),
        ("gate", [term(Fixed), term(Never)], None),
        ("gate", [term(Fixed, 1.0), term(Other)], None),
        ("gate", [term(Fixed, 2.0, weight=0.5), term(Other, 7.0)], 7.0),
        ("gate", [term(Fixed, 1.0, weight=0.5), term(Never)], 0.0),
        ("gate", [term(Fixed, -3.0)], -3.0),
        ("gate", [term(Fixed, float("nan")), term(Never)], None),
        ("first_failure", [term(Fixed, 0.2)], 0.2),
        ("first_failure", [term(Fixed, -1.0), term(Never)], -1.0),
        ("first_failure", [term(Fixed), term(Never)], None),
        ("weighted_sum", [term(Fixed, 1.0), term(Other, -1.0)], 0.0),
        ("weighted_sum", [term(Fixed, 1.0), term(Other, float("inf"))], None),
        ("product", [term(Fixed, -1.0), term(Other, -1.0)], 1.0),
        ("product", [{"name": "gate", "kwargs": {"rewards": [term(Fixed, 0.0), term(Never)]}}, term(Other, 5.0)], 0.0),
    ],
)
def test_what_counts_and_who_is_asked(name: str, rewards: list[dict[str, Any]], expected: float | None) -> None:
    assert ask(name, *rewards).reward == expected


def test_the_breakdown_is_kept_and_the_reason_names_the_term() -> None:
    out = ask("product", term(Fixed, 0.5), term(Other, 3.0))
    assert out.reward_parts == {f"product/{PATH}Fixed": 0.5, f"product/{PATH}Other": 3.0}
    assert f"{PATH}Never: AssertionError: asked" in ask("weighted_sum", term(Never)).reward_failures["weighted_sum"]


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([], "give at least one"),
        ([term(Fixed), term(Fixed)], "only once"),
        ([{"name": "exact_mach"}], "exact_match"),
        ([{"name": "exact_match", "kwargs": {"fild": "a"}}], "field"),
        ([{"name": "exact_match", "wight": 1.0}], "weight"),
        (["exact_match"], "must be a table with a name"),
    ],
)
def test_terms_are_checked_before_the_run(rewards: list[Any], message: str) -> None:
    with pytest.raises((ConfigError, RelaxGymError), match=message):
        ask("gate", *rewards)


def test_a_dotted_path_is_a_reward() -> None:
    assert plugins().get("reward", PATH + "Fixed") is Fixed
    with pytest.raises(PluginError, match="cannot load 'nowhere:X'"):
        plugins().get("reward", "python:nowhere:X")
    with pytest.raises(PluginError, match="must be a class or function"):
        plugins().get("reward", f"python:{__name__}:PATH")
