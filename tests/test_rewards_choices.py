"""Rewards of multiple choice: which letter did the model settle on?"""

from __future__ import annotations

from typing import Any

import pytest
from reward_kit import episode

from relax_gym.errors import RewardError
from relax_gym.testing import check_reward
from relax_gym_rewards.gpqa import GPQA
from relax_gym_rewards.multiple_choice import MultipleChoice

HUGE = 200_000
CITIES = ["Rome", "Paris", "New York", "Oslo"]


@pytest.mark.parametrize(
    ("action", "answer", "expected"),
    [
        ("B", "B", 1.0),
        ("b", "B", 1.0),
        ("(B)", "B", 1.0),
        ("**B**", "B", 1.0),
        ("B.", "(B)", 1.0),
        ("B) Paris", "B", 1.0),
        ("B", 1, 1.0),
        ("B", "Paris", 1.0),
        ("paris", "B", 1.0),
        ("new  york", 2, 1.0),
        ("The answer is B.", "B", 1.0),
        ("The answer is (B).", "B", 1.0),
        ("**Answer:** B", "B", 1.0),
        ("Answer: **B**", "B", 1.0),
        ("answer: b", "B", 1.0),
        ("答案 Answer：B", "B", 1.0),
        (r"\boxed{B}", "B", 1.0),
        (r"\boxed{\text{B}}", "B", 1.0),
        (r"The answer is $\boxed{B}$.", "B", 1.0),
        ("<answer>B</answer>", "B", 1.0),
        ("<answer>Paris</answer>", "B", 1.0),
        ("The answer is A. No, the answer is B.", "B", 1.0),
        ("The answer is A. No, the answer is B.", "A", 0.0),
        ("<think>The answer is B</think>The answer is C", "B", 0.0),
        ("<think>The answer is B", "B", 0.0),
        ("I'd say (B), as it is the capital.", "B", 1.0),
        ("Not (A) but (B).", "B", 0.0),
        ("The answer is:\n\nB", "B", 1.0),
        ("The answer is:\n\n**(B)** Paris", "B", 1.0),
        ("The answer:\nA bird flew", "A", 0.0),
        ("The answer is option B", "B", 1.0),
        (r"Answer: \textbf{B}", "B", 1.0),
        ("The answer is not B", "B", 0.0),
        ("The answer is A or B.", "B", 0.0),
        ("The answer is A or B.", "A", 0.0),
        ("Answer: A, B, C, D", "A", 0.0),
        ("A) B) C) D)", "A", 0.0),
        ("A bird in the hand", "A", 0.0),
        ("The answer is a city", "A", 0.0),
        ("Answer: I'm not sure", "A", 0.0),
        ("The answer is Brussels", "B", 0.0),
        ("C", "B", 0.0),
        ("E", "B", 0.0),
        ("Ｂ", "B", 0.0),
        ("", "B", 0.0),
        ("ABCD", "B", 0.0),
        (r"\boxed{B} or \boxed{C}", "B", 0.0),
        ("the answer is " * (HUGE // 10), "B", 0.0),
    ],
)
def test_multiple_choice(action: str, answer: Any, expected: float) -> None:
    assert MultipleChoice()(episode("A", action, answer=answer, choices=CITIES)) == expected


def test_letters_without_choices_and_the_strict_form() -> None:
    assert MultipleChoice()(episode("E", answer="E")) == 1.0
    assert MultipleChoice(letters="ABCDEF")(episode("the answer is F", answer=5)) == 1.0
    assert MultipleChoice(strict=True)(episode("B", answer="B")) == 0.0
    assert MultipleChoice(strict=True)(episode("Answer: B", answer="B")) == 1.0
    assert MultipleChoice(field="gold", choices="options")(episode("Oslo", gold=0, options=["Oslo", "Bonn"])) == 1.0


@pytest.mark.parametrize(
    ("action", "answer", "expected"),
    [
        ("Answer: B", "B", 1.0),
        ("Answer: $B$", "B", 1.0),
        ("Answer: (B)", "B", 1.0),
        ("answer: B", "B", 1.0),
        ("ANSWER: B.", "B", 1.0),
        ("Reasons …\nAnswer: A\n", "A", 1.0),
        ("The correct answer is (D)", "D", 1.0),
        ("The correct choice is D", "D", 1.0),
        (r"so \boxed{C}", "C", 1.0),
        ("<answer>C</answer>", "C", 1.0),
        ("Answer: A\nOn reflection\nAnswer: B", "B", 1.0),
        ("Answer: A\nOn reflection\nAnswer: B", "A", 0.0),
        ("Answer: B", 1, 1.0),
        ("Answer: B", 0, 0.0),
        ("B", "B", 0.0),
        ("(B)", "B", 0.0),
        ("Answer: E", "A", 0.0),
        ("Answer: A/B", "A", 0.0),
        ("Answer: A and B", "B", 0.0),
        ("<think>Answer: B</think>Answer: A", "B", 0.0),
        ("<think>Answer: B", "B", 0.0),
        ("Answer: Ｂ", "B", 0.0),
        ("", "A", 0.0),
        ("Answer:" * (HUGE // 4), "A", 0.0),
    ],
)
def test_gpqa(action: str, answer: Any, expected: float) -> None:
    assert GPQA()(episode("Answer: C", action, answer=answer)) == expected


def test_gpqa_takes_the_text_of_a_choice() -> None:
    assert GPQA()(episode("Answer: B", answer="Paris", choices=CITIES)) == 1.0
    with pytest.raises(RewardError, match=r"info\['choices'\] holds 2 choices; GPQA has four"):
        GPQA()(episode("Answer: B", answer="B", choices=["a", "b"]))


@pytest.mark.parametrize("reward", [MultipleChoice(letters="ABCD"), GPQA()], ids=["multiple_choice", "gpqa"])
@pytest.mark.parametrize("answer", ["E", "Berlin", "", 4, -1, True, 1.0, ["A"], {"a": 1}], ids=repr)
def test_a_reference_that_is_no_choice_leaves_the_episode_unscored(reward: Any, answer: Any) -> None:
    with pytest.raises(RewardError, match=r"info\['answer'\] is .*; it must be a letter of ABCD, an index from 0"):
        reward(episode("Answer: A", answer=answer))


def test_bad_options_and_choices_are_refused() -> None:
    with pytest.raises(RewardError, match="letters is 'XYZ'; it must be the start of ABC"):
        MultipleChoice(letters="XYZ")
    with pytest.raises(RewardError, match=r"info\['choices'\] is 'AB'; it must be a list of 1 to 26 choices"):
        MultipleChoice()(episode("A", answer="A", choices="AB"))


@pytest.mark.parametrize("reward", [MultipleChoice(), GPQA()], ids=["multiple_choice", "gpqa"])
def test_they_keep_the_contract_of_rewards(reward: Any) -> None:
    results = check_reward(reward, [episode("B", "Answer: A", answer="A"), episode("", answer="B")])
    assert [result.name for result in results if not result.passed] == []
