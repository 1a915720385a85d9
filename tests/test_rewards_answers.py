"""Rewards of short answers: SQuAD's, letters of choices, GSM8K, regular expressions and JSON."""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import Any

import pytest
from reward_kit import episode

from relax_gym.errors import RewardError
from relax_gym.testing import check_reward
from relax_gym_rewards.em import EM
from relax_gym_rewards.f1 import F1

HUGE = 200_000

# --- SQuAD -----------------------------------------------------------------------------------------------------------

SQUAD = [
    # action, reference, em, f1
    ("Denver Broncos", "Denver Broncos", 1.0, 1.0),
    ("the denver broncos!", "Denver Broncos", 1.0, 1.0),
    ("The Denver  Broncos.", "a Denver Broncos", 1.0, 1.0),
    ("Broncos", "Denver Broncos", 0.0, 2 / 3),
    ("Denver Broncos won it", "Denver Broncos", 0.0, 2 / 3),
    ("Broncos Denver", "Denver Broncos", 0.0, 1.0),
    ("Carolina Panthers", "Denver Broncos", 0.0, 0.0),
    ("Denver", ["Broncos", "Denver Broncos"], 0.0, 2 / 3),
    ("Broncos", ["Broncos", "Denver Broncos"], 1.0, 1.0),
    ("", "Denver", 0.0, 0.0),
    ("", "", 1.0, 1.0),
    ("the", "", 1.0, 1.0),
    ("Denver", "", 0.0, 0.0),
    ("7", 7, 1.0, 1.0),
    ("７", 7, 0.0, 0.0),
    ("1,000", "1000", 1.0, 1.0),
    ("well-known", "wellknown", 1.0, 1.0),
    ("another", "other", 0.0, 0.0),
    ("Denver Denver", "Denver", 0.0, 2 / 3),
    ("Denver Denver Denver Denver", "Denver Broncos", 0.0, 1 / 3),
    ("<think>Denver</think>Boston", "Denver", 0.0, 0.0),
    ("<think>Denver", "Denver", 0.0, 0.0),
    ("It is <answer>Denver</answer> I think", "Denver", 1.0, 1.0),
    ("<answer>Boston</answer> <answer>Denver</answer>", "Boston", 0.0, 0.0),
    ("<answer>Denver", "Denver", 0.0, 0.0),
    ("Denver or Boston or Rome", "Rome", 0.0, 1 / 3),
    ("x " * HUGE + "Denver", "Denver", 0.0, 2 / (HUGE + 2)),
]


def squad_words(text: str) -> list[str]:
    """SQuAD's evaluation, version 1.1, in its own order of steps."""
    text = "".join(character for character in text.lower() if character not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split()).split()


def squad_f1(given: str, expected: str) -> float:
    left, right = squad_words(given), squad_words(expected)
    same = sum((Counter(left) & Counter(right)).values())
    if same == 0:
        return 0.0
    precision, recall = same / len(left), same / len(right)
    return 2 * precision * recall / (precision + recall)


@pytest.mark.parametrize(("action", "answer", "em", "f1"), SQUAD)
def test_em_and_f1(action: str, answer: Any, em: float, f1: float) -> None:
    assert EM()(episode("something else", action, answer=answer)) == em
    assert F1()(episode("something else", action, answer=answer)) == pytest.approx(f1, abs=1e-12)


@pytest.mark.parametrize(("action", "answer", "em", "f1"), SQUAD)
def test_em_and_f1_agree_with_squads_own_evaluation(action: str, answer: Any, em: float, f1: float) -> None:
    if "<" in action or answer == "":
        return  # tags are not in SQuAD, and answers that are not there only in its version 2
    allowed = [str(item) for item in (answer if isinstance(answer, list) else [answer])]
    assert max(squad_words(action) == squad_words(item) for item in allowed) == em
    assert max(squad_f1(action, item) for item in allowed) == pytest.approx(f1, abs=1e-12)


@pytest.mark.parametrize(
    ("action", "answer", "expected"),
    [
        ("A", "A", 1.0),
        ("a.", "A", 1.0),
        ("(A)", "a", 1.0),
        ("", "A", 0.0),
        ("the", "A", 0.0),
        ("!!!", "a", 0.0),
        ("B", "A", 0.0),
        ("the", "The", 1.0),
        ("+", "+", 1.0),
        ("", "+", 0.0),
        ("-", "+", 0.0),
        ("the", ["A", "Denver"], 0.0),
        ("the Denver", ["A", "Denver"], 1.0),
        ("the", ["A", ""], 1.0),
    ],
)
def test_a_reference_of_articles_and_punctuation_only_is_taken_as_it_is(
    action: str, answer: Any, expected: float
) -> None:
    finished = episode("something else", action, answer=answer)
    assert (EM()(finished), F1()(finished)) == (expected, expected)


# --- what they all refuse --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reward", [EM(), F1()], ids=["em", "f1"])
@pytest.mark.parametrize("answer", [{"a": 1}, [], [None], ["a", ["b"]], True, b"a"], ids=repr)
def test_a_reference_of_a_wrong_type_leaves_the_episode_unscored(reward: Any, answer: Any) -> None:
    with pytest.raises(RewardError, match=r"info\['answer'\] is .*; it must be"):
        reward(episode("a", answer=answer))


@pytest.mark.parametrize("reward", [EM(), F1()], ids=["em", "f1"])
def test_they_keep_the_contract_of_rewards(reward: Any) -> None:
    results = check_reward(reward, [episode("b", "a", answer="a"), episode("", answer=["a", "b"])])
    assert [result.name for result in results if not result.passed] == []
