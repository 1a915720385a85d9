"""Rewards of how a text looks: format, length and repetition."""

from __future__ import annotations

from typing import Any

import pytest
from reward_kit import episode

from relax_gym.errors import RewardError
from relax_gym.testing import check_reward
from relax_gym_rewards._answers import boxed, library, spoken, tagged
from relax_gym_rewards.format import Format
from relax_gym_rewards.length import Length
from relax_gym_rewards.repetition import Repetition

HUGE = 200_000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("42", "42"),
        ("", ""),
        ("<think>41</think>42", "42"),
        ("41</think>42", "42"),
        ("<think>41", ""),
        ("42<think>41</think>", "42"),
        ("a<think>b</think>c<think>d</think>e", "ace"),
        ("a<think>b</think>c<think>d", "ac"),
        ("x</think>a<think>b</think>c", "ac"),
    ],
)
def test_thinking_is_not_spoken(text: str, expected: str) -> None:
    assert spoken(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{1}", "1"),
        (r"\boxed{1} or \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{ \{1, 2\} }", r"\{1, 2\}"),
        (r"\fbox{3}", "3"),
        (r"\boxed{1", None),
        ("1", None),
        (r"\boxed{}", ""),
        (r"\boxed{" * 50_000, None),
    ],
)
def test_the_last_box_counts(text: str, expected: str | None) -> None:
    assert boxed(text) == expected


def test_the_last_closed_tag_counts() -> None:
    assert tagged("<answer>1</answer> no <answer> 2 </answer>") == "2"
    assert tagged("<answer>1</answer><answer>2") == "1"
    assert [tagged(text) for text in ("", "<answer>", "</answer>", "</answer><answer>")] == [None] * 4


GOOD = "<think>two and two</think>\n<answer>4</answer>"


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        (GOOD, {}, 1.0),
        (f"\n {GOOD} \n", {}, 1.0),
        ("<think>\na\nb\n</think><answer>4</answer>", {}, 1.0),
        ("<answer>4</answer><think>why</think>", {}, 0.0),
        ("<think>a</think>4", {}, 0.0),
        ("<answer>4</answer>", {}, 0.0),
        ("<think>a<answer>4</answer></think>", {}, 0.0),
        ("<think>a</think><answer>4", {}, 0.0),
        ("<think>a<answer>4</answer>", {}, 0.0),
        (f"{GOOD}<answer>5</answer>", {}, 0.0),
        (f"{GOOD} So, 4.", {}, 0.0),
        (f"{GOOD} So, 4.", {"outside": True}, 1.0),
        (f"{GOOD}{GOOD}", {"outside": True}, 0.0),
        ("<think></think><answer>4</answer>", {}, 0.0),
        ("<think>a</think><answer> \n</answer>", {}, 0.0),
        ("<THINK>a</THINK><answer>4</answer>", {}, 0.0),
        ("< think>a</think><answer>4</answer>", {}, 0.0),
        ("", {}, 0.0),
        ("４", {}, 0.0),
        ("a</think><answer>4</answer>", {"opened": True}, 1.0),
        ("<think>a</think><answer>4</answer>", {"opened": True}, 0.0),
        ("<plan>a</plan><do>b</do><check>c</check>", {"tags": ["plan", "do", "check"]}, 1.0),
        ("<plan>a</plan><check>c</check><do>b</do>", {"tags": ["plan", "do", "check"]}, 0.0),
        ("<think>use <b>bold</b></think><answer>4</answer>", {}, 1.0),
        ("<think>" * HUGE, {}, 0.0),
    ],
)
def test_format(text: str, options: dict[str, Any], expected: float) -> None:
    assert Format(**options)(episode("something else", text)) == expected


def test_format_of_all_turns_is_the_share_of_good_ones() -> None:
    assert Format(turns="all")(episode(GOOD, "4", GOOD, GOOD)) == 0.75


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (0, 0.0),
        (1, 0.0),
        (79, 0.0),
        (80, 0.0),
        (81, -0.05),
        (85, -0.25),
        (90, -0.5),
        (99, -0.95),
        (100, -1.0),
        (101, -1.0),
        (5000, -1.0),
    ],
)
def test_length_is_dapos_soft_overlong_punishment(length: int, expected: float) -> None:
    reward = Length(max_length=100, buffer=20)
    assert reward(episode("a", tokens=((7,) * length,))) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("actions", "tokens", "options", "expected"),
    [
        (("a", "b"), (6, 6), {"max_length": 10}, -1.0),
        (("a", "b"), (6, 6), {"max_length": 10, "over": "turn"}, 0.0),
        (("a", "b"), (6, 11), {"max_length": 10, "over": "turn"}, -1.0),
        (("a", "b"), (5, 5), {"max_length": 10}, 0.0),
        (("a", "b"), (5, 5), {"max_length": 10, "buffer": 10}, -1.0),
        (("a", "b"), (3, 2), {"max_length": 10, "buffer": 10}, -0.5),
        (("a", "b"), (5, 6), {"max_length": 10, "penalty": 0.3}, -0.3),
        (("a", "b"), (5, 6), {"max_length": 10, "penalty": 0}, 0.0),
        (("abc", "defg"), (0, 0), {"max_length": 6, "unit": "characters"}, -1.0),
        (("abc", "def"), (99, 99), {"max_length": 6, "unit": "characters"}, 0.0),
        (("日本語",), (9,), {"max_length": 3, "unit": "characters"}, 0.0),
        ((), (), {"max_length": 1}, 0.0),
    ],
)
def test_length_options(
    actions: tuple[str, ...], tokens: tuple[int, ...], options: dict[str, Any], expected: float
) -> None:
    ids = tuple((7,) * count for count in tokens)
    assert Length(**options)(episode(*actions, tokens=ids)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("", {}, 0.0),
        ("one", {}, 0.0),
        ("one two three", {}, 0.0),
        ("one two three four", {}, 0.0),
        ("a a a a", {}, -0.5),
        ("a a a a a", {}, -2 / 3),
        ("a b c a b c", {}, -0.25),
        ("A b, C. a B c!", {}, -0.25),
        ("a b a b", {"n": 2}, -1 / 3),
        ("a b a b", {"n": 1}, -0.5),
        ("a b c d", {"n": 1}, 0.0),
        ("a a a a", {"penalty": 2.0}, -1.0),
        ("a a a a", {"penalty": 0.0}, 0.0),
        ("a a a a", {"n": 4}, 0.0),
        ("a a a a", {"n": 5}, 0.0),
        ("aaaa", {}, 0.0),
        ("aaaa", {"unit": "characters"}, -0.5),
        ("哈哈哈哈", {}, -0.5),
        ("哈a哈a", {"n": 2}, -1 / 3),
        ("<think>a a a a</think> b", {}, -0.2),
        ("... ... ... ...", {}, 0.0),
        ("x " * HUGE, {}, -(1 - 1 / (HUGE - 2))),
    ],
)
def test_repetition(text: str, options: dict[str, Any], expected: float) -> None:
    assert Repetition(**options)(episode(text)) == pytest.approx(expected, abs=1e-12)


def test_repetition_takes_the_worst_turn_and_can_look_at_tokens() -> None:
    assert Repetition()(episode("a b c", "a a a a", "a b c")) == -0.5
    assert Repetition(unit="tokens")(episode("a b c d", tokens=((5, 5, 5, 5),))) == -0.5
    assert Repetition()(episode()) == 0.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Format(tags=[]), r"format: tags is \[\]; it must be a list of different names"),
        (lambda: Format(tags="think"), "tags is 'think'"),
        (lambda: Format(tags=["a", "a"]), "tags is"),
        (lambda: Format(tags=["a|b"]), "tags is"),
        (lambda: Format(turns="first"), "format: turns is 'first'; it must be one of 'last', 'all'"),
        (lambda: Length(max_length=0), "length: max_length is 0; it must be a whole number from 1"),
        (lambda: Length(max_length=True), "max_length is True"),
        (lambda: Length(max_length=10, buffer=11), "buffer is 11; it must be a whole number from 0 to 10"),
        (lambda: Length(max_length=10, penalty=-1), "penalty is -1"),
        (lambda: Length(max_length=10, unit="words"), "unit is 'words'; it must be one of 'tokens', 'characters'"),
        (lambda: Length(max_length=10, over="run"), "over is 'run'"),
        (lambda: Repetition(n=0), "repetition: n is 0"),
        (lambda: Repetition(penalty=float("nan")), "penalty is nan"),
        (lambda: Repetition(unit="lines"), "unit is 'lines'"),
    ],
)
def test_bad_options_are_refused(make: Any, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        make()


def test_a_library_that_is_not_there_names_the_extra() -> None:
    with pytest.raises(RewardError, match=r"wer needs no_such_library; run: pip install 'relax-gym\[rewards\]'"):
        library("no_such_library", "wer")


def test_an_episode_without_turns_has_no_format() -> None:
    with pytest.raises(RewardError, match="episode e1 has no turns"):
        Format()(episode())


@pytest.mark.parametrize("reward", [Format(), Length(max_length=3), Repetition()])
def test_they_keep_the_contract_of_rewards(reward: Any) -> None:
    results = check_reward(reward, [episode(GOOD, "a a a a", tokens=((1, 2), (3, 4))), episode(GOOD)])
    assert [result.name for result in results if not result.passed] == []
