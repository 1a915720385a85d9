"""Rewards of mathematics: which answer counts, in whose form, and the verifiers of well-known data sets."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from reward_kit import episode

from relax_gym.errors import RewardError
from relax_gym.testing import check_reward
from relax_gym_rewards._latex import plain_latex
from relax_gym_rewards.dapo_math import DAPOMath
from relax_gym_rewards.deepscaler_math import DeepScaleRMath
from relax_gym_rewards.geo3k import Geo3K
from relax_gym_rewards.math import Math, compare
from relax_gym_rewards.openr1mm import OpenR1MM

HUGE = 200_000


@pytest.fixture(scope="module")
def rewards() -> Iterator[dict[str, Any]]:
    """One of each; they share their processes."""
    made = {kind.name: kind(timeout=20.0, workers=1) for kind in (Math, DeepScaleRMath, Geo3K, OpenR1MM)}
    yield made
    for reward in made.values():
        reward.close()


def ask(reward: Any, action: str, answer: Any) -> float:
    result: float = asyncio.run(reward(episode("something else", action, answer=answer)))
    return result


@pytest.mark.parametrize(
    ("action", "answer", "expected"),
    [
        (r"\boxed{42}", "42", 1.0),
        (r"first \boxed{41}, then \boxed{42}", "42", 1.0),
        (r"first \boxed{42}, then \boxed{41}", "42", 0.0),
        (r"$\boxed{1}$ and $\boxed{2}$", r"\{1, 2\}", 1.0),
        (r"\boxed{41} hm, 42", "42", 0.0),
        (r"\boxed{\dfrac{1}{2}}", "0.5", 1.0),
        ("<answer>42</answer>", "42", 1.0),
        ("<answer>41</answer> 42", "42", 0.0),
        (r"<answer>\boxed{42}</answer> 41", "42", 1.0),
        (r"<think>\boxed{42}</think>\boxed{41}", "42", 0.0),
        (r"<think>\boxed{42}</think>", "42", 0.0),
        (r"<think>\boxed{42}", "42", 0.0),
        (r"\boxed{42}</think>", "42", 0.0),
        ("1 no, 42", "42", 1.0),
        ("42 no, 1", "42", 0.0),
        (r"\boxed{41 or 42}", "42", 0.0),
        (r"\boxed{41, 42, 43}", "42", 0.0),
        (r"\boxed{42", "41", 0.0),
        ("2", ["1", "2"], 1.0),
        ("3", ["1", "2"], 0.0),
        (r"\boxed{}", "42", 0.0),
        ("", "42", 0.0),
        (r"$x \in (1, 2]$", "(1,2]", 1.0),
    ],
)
def test_math_takes_the_last_answer_aloud(rewards: dict[str, Any], action: str, answer: Any, expected: float) -> None:
    assert ask(rewards["math"], action, answer) == expected


@pytest.mark.parametrize("answer", [True, {"a": 1}, [], None], ids=repr)
@pytest.mark.parametrize("name", ["math", "deepscaler_math", "geo3k", "openr1mm"])
def test_a_reference_of_a_wrong_type_leaves_the_episode_unscored(
    rewards: dict[str, Any], name: str, answer: Any
) -> None:
    with pytest.raises(RewardError, match=r"'answer'"):
        ask(rewards[name], "<think>a</think>1", answer)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("34", "34"),
        ("$34$", "34"),
        (r"\boxed{34}.", "34"),
        ("**34**", "34"),
        ("1,234", "1234"),
        ("1,2", "1,2"),
        (".5", "0.5"),
        ("7.0", "7"),
        ("7.05", "7.05"),
        (r"\dfrac12", r"\frac{1}{2}"),
        ("1/2", r"\frac{1}{2}"),
        (r"\frac{1}{2}", r"\frac{1}{2}"),
        (r"\sqrt2", r"\sqrt{2}"),
        (r"90^\circ", "90"),
        (r"90^{\circ}", "90"),
        ("90°", "90"),
        (r"12\text{ cm}", "12"),
        ("12 dollars", "12"),
        (r"50\%", "50"),
        ("x = 5", "5"),
        (r"\left( 1, 2 \right)", "(1,2)"),
        (r"\text{east}", "east"),
        ("−3", "-3"),
        ("", ""),
    ],
)
def test_one_way_of_writing(text: str, expected: str) -> None:
    assert plain_latex(text) == expected


@pytest.mark.parametrize(
    ("action", "answer", "expected"),
    [
        ("Answer: 34", "34", 1.0),
        ("Answer: $34$", "34", 1.0),
        (r"Answer: \boxed{34}", "34", 1.0),
        ("**Answer:** 34", "34", 1.0),
        ("answer : 34.", "34", 1.0),
        ("Answer: 34", 34, 1.0),
        ("Answer: 1,234", "1234", 1.0),
        (r"Answer: \dfrac{1}{2}", "1/2", 1.0),
        ("Answer: 0.5", "1/2", -1.0),
        ("Answer: 35", "34", -1.0),
        ("34", "34", -1.0),
        (r"\boxed{34}", "34", -1.0),
        ("Answer: 35\nAnswer: 34", "34", 1.0),
        ("Answer: 34\nAnswer: 35", "34", -1.0),
        ("Answer: 34 or 35", "34", -1.0),
        ("Answer:\n34", "34", -1.0),
        ("Answer: 34\nwhich is right", "34", 1.0),
        ("Answer: 34" + " and so on" * 100, "34", -1.0),
        ("so on " * 100 + "Answer: 34", "34", 1.0),
        ("<think>Answer: 34</think>", "34", -1.0),
        ("<think>Answer: 34", "34", -1.0),
        ("Answer: ３４", "34", -1.0),
        ("", "34", -1.0),
        ("Answer:" * HUGE, "34", -1.0),
        ("Answer: 34", ["33", "34"], 1.0),
    ],
)
def test_dapo_math(action: str, answer: Any, expected: float) -> None:
    assert DAPOMath()(episode("Answer: 34", action, answer=answer)) == expected


def test_dapo_math_options() -> None:
    assert DAPOMath(answer="boxed")(episode(r"so \boxed{34}", answer="34")) == 1.0
    assert DAPOMath(answer="boxed", wrong=0)(episode("Answer: 34", answer="34")) == 0.0
    with pytest.raises(RewardError, match="dapo_math: answer is 'last'; it must be one of 'line', 'boxed'"):
        DAPOMath(answer="last")
    with pytest.raises(RewardError, match="wrong is nan"):
        DAPOMath(wrong=float("nan"))
    with pytest.raises(RewardError, match=r"info\['answer'\] is \{'a': 1\}"):
        DAPOMath()(episode("Answer: 34", answer={"a": 1}))


@pytest.mark.parametrize(
    ("action", "answer", "expected"),
    [
        (r"<think>x</think>\boxed{42}", "42", 1.0),
        (r"<think>x</think>The answer is $\boxed{42}$.", 42, 1.0),
        (r"x</think>\boxed{42}", "42", 1.0),
        (r"\boxed{42}", "42", 0.0),
        (r"<think>\boxed{42}", "42", 0.0),
        (r"<think>\boxed{42}</think>", "42", 0.0),
        (r"<think>\boxed{42}</think>\boxed{41}", "42", 0.0),
        ("<think>x</think>42", "42", 0.0),
        (r"<think>x</think>\boxed{41} \boxed{42}", "42", 1.0),
        (r"<think>x</think>\boxed{42} \boxed{41}", "42", 0.0),
        (r"<think>x</think>\boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"<think>x</think>\boxed{\dfrac12}", "1/2", 1.0),
        (r"<think>x</think>\boxed{42}", r"so \boxed{42}", 1.0),
        (r"<think>x</think>\boxed{\text{east}}", "east", 1.0),
        (r"<think>x</think>\boxed{\text{west}}", "east", 0.0),
        (r"<think>x</think>\boxed{2\sqrt{2}}", r"\sqrt{8}", 1.0),
        (r"<think>x</think>\boxed{42}", ["41", "42"], 1.0),
        (r"<think>x</think>\boxed{42 or 43}", "42", 0.0),
        (r"<think>x</think>\boxed{}", "42", 0.0),
        (r"<think>x</think>\boxed{42", "42", 0.0),
        ("", "42", 0.0),
        ("</think>" + r"\boxed{" * 10_000, "42", 0.0),
    ],
)
def test_deepscaler_math(rewards: dict[str, Any], action: str, answer: Any, expected: float) -> None:
    assert ask(rewards["deepscaler_math"], action, answer) == expected


def test_deepscaler_math_without_thinking(rewards: dict[str, Any]) -> None:
    assert ask(DeepScaleRMath(thinking=False), r"\boxed{42}", "42") == 1.0


@pytest.mark.parametrize(
    ("action", "answer", "expected"),
    [
        (r"<think>x</think>\boxed{42}", "42", 1.0),
        (r"<think>x</think> so $\boxed{42}$", "42", 1.0),
        (r"<think>x</think>\boxed{41}", "42", 0.1),
        (r"\boxed{42}", "42", 0.9),
        (r"\boxed{41}", "42", 0.0),
        ("<think>x</think>42", "42", 0.0),
        (r"<think>\boxed{42}</think>", "42", 0.0),
        (r"<think>\boxed{42}</think>\boxed{41}", "42", 0.1),
        (r"<think>\boxed{42}", "42", 0.0),
        (r"Well <think>x</think>\boxed{42}", "42", 0.9),
        (r"<think>x</think><think>y</think>\boxed{42}", "42", 0.9),
        (r"x</think>\boxed{42}", "42", 0.9),
        (r"<think>x</think>\boxed{12\sqrt{2}}", r"\sqrt{288}", 1.0),
        (r"<think>x</think>\boxed{30^\circ}", "30", 1.0),
        (r"<think>x</think>\boxed{12\text{ cm}}", "12", 1.0),
        (r"<think>x</think>\boxed{1.5}", r"\frac{3}{2}", 1.0),
        (r"<think>x</think>\boxed{41}\boxed{42}", "42", 1.0),
        (r"<think>x</think>\boxed{42}\boxed{41}", "42", 0.1),
        (r"<think>x</think>\boxed{}", "42", 0.1),
        ("", "42", 0.0),
        ("<think>" * 10_000, "42", 0.0),
    ],
)
def test_geo3k(rewards: dict[str, Any], action: str, answer: Any, expected: float) -> None:
    assert ask(rewards["geo3k"], action, answer) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("action", "answer", "expected"),
    [
        ("<think>x</think><answer>42</answer>", "42", 1.0),
        ("<think>x</think>\n<answer> 42 </answer>\n", 42, 1.0),
        ("<think>x</think><answer>41</answer>", "42", 0.5),
        ("<answer>42</answer>", "42", 0.5),
        ("<answer>41</answer>", "42", 0.0),
        ("<think>x</think>42", "42", 0.0),
        ("42", "42", 0.0),
        ("<think><answer>42</answer></think>", "42", 0.0),
        ("<think><answer>42</answer>", "42", 0.0),
        ("<think>x</think><answer>42</answer> So there.", "42", 0.5),
        ("<think>x</think><answer>41</answer><answer>42</answer>", "42", 0.5),
        ("<think>x</think><answer>42</answer><answer>41</answer>", "42", 0.0),
        (r"<think>x</think><answer>\boxed{42}</answer>", "42", 1.0),
        (r"<think>x</think><answer>$\frac{1}{2}$</answer>", "0.5", 1.0),
        ("<think>x</think><answer>A Cat</answer>", "a  cat", 1.0),
        ("<think>x</think><answer>a dog</answer>", "a cat", 0.5),
        ("<think>x</think><answer>B</answer>", "B", 1.0),
        ("<think>x</think><answer>42</answer>", "<answer>42</answer>", 1.0),
        ("<think>x</think><answer></answer>", "42", 0.0),
        ("<think>x</think><answer>42", "42", 0.0),
        ("", "42", 0.0),
        ("<answer>" * 10_000, "42", 0.0),
    ],
)
def test_openr1mm(rewards: dict[str, Any], action: str, answer: Any, expected: float) -> None:
    assert ask(rewards["openr1mm"], action, answer) == pytest.approx(expected, abs=1e-12)


def test_a_template_that_opens_the_thinking_is_taken_into_account(rewards: dict[str, Any]) -> None:
    assert ask(OpenR1MM(opened=True), "x</think><answer>42</answer>", "42") == 1.0
    assert ask(Geo3K(opened=True), r"x</think>\boxed{42}", "42") == 1.0
    assert ask(Geo3K(opened=True, format_weight=0.25), "x</think>42", "42") == 0.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Geo3K(format_weight=1.5), "geo3k: format_weight is 1.5; it must be a number from 0 to 1"),
        (lambda: OpenR1MM(format_weight=-1), "openr1mm: format_weight is -1"),
        (lambda: DeepScaleRMath(timeout=0), "deepscaler_math: timeout is 0"),
    ],
)
def test_bad_options_are_refused(make: Any, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        make()


@pytest.mark.parametrize(
    ("given", "expected"), [("1/2", "0.5"), ("x+1", "1+x"), ("2", "3"), (r"$\sqrt{4}$", "2"), (r"\{1,2\}", r"\{2,1\}")]
)
def test_math_agrees_with_math_verify(given: str, expected: str) -> None:
    from math_verify import parse, verify

    pair = [parse(f"${text.strip('$')}$", parsing_timeout=None) for text in (expected, given)]
    assert (compare(given, expected) == "equal") == verify(*pair, timeout_seconds=None)


def test_k81_a_crafted_box_has_no_side_effect(rewards: dict[str, Any], tmp_path: Any) -> None:
    payload = rf"</think>\boxed{{__import__('pathlib').Path('{tmp_path}/pwned').touch()}}"
    for name in ("deepscaler_math", "geo3k"):
        assert ask(rewards[name], payload, "42") < 0.5
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["math", "deepscaler_math", "geo3k", "openr1mm"])
def test_they_keep_the_contract_of_rewards(rewards: dict[str, Any], name: str) -> None:
    episodes = [episode(r"<think>x</think>\boxed{2}", answer="2"), episode("<answer>3</answer>", answer="2")]
    results = check_reward(rewards[name], episodes)
    assert [result.name for result in results if not result.passed] == []


def test_dapo_math_keeps_the_contract_of_rewards() -> None:
    results = check_reward(DAPOMath(), [episode("Answer: 3", "Answer: 2", answer="2"), episode("", answer="2")])
    assert [result.name for result in results if not result.passed] == []
