"""The plainest built-in rewards by hand-checked cases."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from reward_kit import episode

from relax_gym.errors import RewardError
from relax_gym_rewards.env_return import EnvReturn
from relax_gym_rewards.exact_match import ExactMatch
from relax_gym_rewards.math import Math
from relax_gym_rewards.numeric import Numeric
from relax_gym_rewards.turn_penalty import TurnPenalty


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ((1.0,), 1.0),
        ((0.0,), 0.0),
        ((-1.0,), -1.0),
        ((0.5, 0.25), 0.75),
        ((0.0, 0.0, 1.0), 1.0),
        ((1.0, -1.0), 0.0),
        ((None,), 0.0),
        ((0.5, None), 0.5),
        ((1e9, 1.0), 1000000001.0),
        ((-0.1, -0.1, -0.1, 2.3), 2.0),
    ],
)
def test_env_return(rewards: tuple[float | None, ...], expected: float) -> None:
    assert EnvReturn()(episode(*"a" * len(rewards), rewards=rewards)) == pytest.approx(expected, abs=1e-12)


def test_env_return_of_nan_is_nan_and_of_no_turn_is_zero() -> None:
    assert math.isnan(EnvReturn()(episode("a", "b", rewards=(1.0, math.nan))))
    assert EnvReturn()(episode()) == 0.0


@pytest.mark.parametrize(
    ("turns", "per_turn", "expected"),
    [
        (0, 0.01, 0.0),
        (1, 0.01, 0.0),
        (2, 0.01, -0.01),
        (3, 0.01, -0.02),
        (11, 0.01, -0.1),
        (1, 1.0, 0.0),
        (2, 1.0, -1.0),
        (5, 0.5, -2.0),
        (4, 0.0, 0.0),
        (101, 0.25, -25.0),
    ],
)
def test_turn_penalty(turns: int, per_turn: float, expected: float) -> None:
    assert TurnPenalty(per_turn=per_turn)(episode(*"a" * turns)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("action", "answer", "expected"),
    [
        ("Paris", "Paris", 1.0),
        ("paris", "Paris", 1.0),
        (" Paris.\n", "paris", 1.0),
        ("'Paris'.", "paris", 1.0),
        ("**New   York!**", "new york", 1.0),
        ("Paris is it", "Paris", 0.0),
        ("", "Paris", 0.0),
        ("-3", "3", 0.0),
        (".5", "5", 0.0),
        ("7", 7, 1.0),
        ("!", "?", 0.0),
        ("B", ["A", "b"], 1.0),
        ("C", ["A", "B"], 0.0),
        ("STRASSE", "straße", 1.0),
        ("Paris\nParis", "Paris", 0.0),
        ("P a r i s", "Paris", 0.0),
        ("<answer>Paris</answer>", "Paris", 0.0),
        ("Paris, or London", "Paris", 0.0),
        ("[]", "", 0.0),
        ("1.0", 1, 0.0),
        ("a-b", "a-b", 1.0),
        ("café", "cafe", 0.0),
    ],
)
def test_exact_match(action: str, answer: Any, expected: float) -> None:
    assert ExactMatch()(episode("something else", action, answer=answer)) == expected


def test_exact_match_options() -> None:
    assert ExactMatch(ignore_case=False)(episode("paris", answer="Paris")) == 0.0
    assert ExactMatch(strip_punctuation=False)(episode("Paris.", answer="Paris")) == 0.0
    assert ExactMatch(field="gold")(episode("Paris", gold="paris", answer="Rome")) == 1.0


@pytest.mark.parametrize(
    ("action", "answer", "expected"),
    [
        ("42", 42, 1.0),
        ("The answer is 42.", "42", 1.0),
        ("first 41, then 42", 42, 1.0),
        ("42, no: 41", 42, 0.0),
        ("1,234,567", 1234567, 1.0),
        ("1,2", 2, 1.0),
        ("-3", -3, 1.0),
        ("10-3", 3, 1.0),
        ("10 - 3", 3, 1.0),
        ("so -$2.50", -2.5, 1.0),
        ("−7", -7, 1.0),
        ("0.5", "1/2", 1.0),
        ("3/4", 0.75, 1.0),
        ("-3 / 4", -0.75, 1.0),
        ("5/0", 5, 0.0),
        ("12%", 0.12, 1.0),
        ("12%", 12, 1.0),
        ("12", "12%", 0.0),
        ("0.12", "12 %", 1.0),
        ("1200%", "12%", 0.0),
        (".5", 0.5, 1.0),
        ("1e3", 1000, 1.0),
        ("1e999", 5, 0.0),
        ("答案是42", 42, 1.0),
        ("H2O", 2, 0.0),
        ("I do not know", 0, 0.0),
        ("", 0, 0.0),
        ("0.333333", 1 / 3, 1.0),
        ("0.3333", 1 / 3, 0.0),
        ("5", "work: 2+3\n#### 5", 1.0),
    ],
)
def test_numeric(action: str, answer: Any, expected: float) -> None:
    assert Numeric()(episode(action, answer=answer)) == expected


def test_numeric_tolerance_is_absolute_below_one_and_relative_above() -> None:
    assert Numeric(tolerance=0.1)(episode("0.55", answer=0.5)) == 1.0
    assert Numeric(tolerance=0.1)(episode("0.65", answer=0.5)) == 0.0
    assert Numeric(tolerance=0.1)(episode("109", answer=100)) == 1.0
    assert Numeric(tolerance=0.1)(episode("111", answer=100)) == 0.0


@pytest.mark.parametrize("reward", [ExactMatch(), Numeric(), Math()])
def test_a_missing_reference_names_the_field_and_the_keys(reward: Any) -> None:
    with pytest.raises(RewardError, match=r"test/Quiz-v0 left no 'answer' in info.*its keys: 'gold', 'level'"):
        result = reward(episode("42", gold=42, level=1))
        asyncio.run(result)


@pytest.mark.parametrize("reward", [ExactMatch(), Numeric()])
def test_an_episode_without_turns_has_no_answer_to_score(reward: Any) -> None:
    with pytest.raises(RewardError, match="episode e1 has no turns"):
        reward(episode(answer=42))


def test_a_reference_without_a_number_is_an_error_not_a_zero() -> None:
    with pytest.raises(RewardError, match=r"info\['answer'\] is 'many', which holds no number"):
        Numeric()(episode("3", answer="many"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Numeric(tolerance=-1), "tolerance is -1"),
        (lambda: Numeric(tolerance=math.nan), "tolerance is nan"),
        (lambda: TurnPenalty(per_turn=-0.1), "per_turn is -0.1"),
        (lambda: Math(timeout=0), "timeout is 0"),
        (lambda: Math(workers=0), "workers 0"),
    ],
)
def test_bad_options_are_refused(make: Any, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        make()
