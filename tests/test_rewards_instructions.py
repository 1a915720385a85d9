"""Rewards of instructions that a program can verify, and of noise."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
from reward_kit import episode

from relax_gym.errors import RewardError
from relax_gym.testing import check_reward
from relax_gym_rewards._instructions import CHECKS
from relax_gym_rewards.ifbench import IFBench
from relax_gym_rewards.random import Random


def few(kind: str, relation: str, count: int, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "relation": relation, "count": count, **more}


CASES: list[tuple[dict[str, Any], str, str]] = [
    # instruction, a text that follows it, one that does not
    ({"kind": "include", "phrases": ["cat", "red hat"]}, "A Cat in a red hat.", "A category of red hats."),
    ({"kind": "include", "phrases": ["C++"]}, "I like C++.", "I like C."),
    ({"kind": "include", "phrases": ["(a+)+$"]}, "see (a+)+$", "a" * 50_000),
    ({"kind": "avoid", "phrases": ["cat"]}, "A category.", "A CAT!"),
    (few("frequency", "exactly", 2, phrase="cat"), "Cat, cat.", "cat category"),
    (few("frequency", "less than", 1, phrase="cat"), "dog", "cat"),
    (few("letter_frequency", "at least", 3, letter="E"), "eEe", "ee"),
    (few("letter_frequency", "at most", 0, letter="!"), "calm", "calm!"),
    ({"kind": "in_order", "phrases": ["one", "two", "three"]}, "One, then two, three.", "three two one"),
    ({"kind": "in_order", "phrases": ["one", "one"]}, "one one", "one"),
    ({"kind": "palindrome"}, "The level is low.", "The dog ran; a, oo, 11."),
    ({"kind": "unique_words"}, "every word differs", "a word is a word"),
    (few("words", "at most", 3), "one two three", "one two three four"),
    (few("words", "exactly", 2), "don't well-known", "do not know"),
    (few("words", "more than", 1), "one two", "one"),
    (few("sentences", "exactly", 2), "It is 3.5 m. Good!", "It is. So. There."),
    (few("sentences", "at least", 2), "Really?! Yes.", "Really?!..."),
    (few("paragraphs", "exactly", 2), "one\n\ntwo", "one\ntwo"),
    (few("paragraphs", "exactly", 3), "one\n***\ntwo\n---\nthree", "one *** two\n\nthree"),
    (few("lines", "exactly", 2), "a\n\nb", "a b"),
    (few("characters", "at most", 3), "日本語", "日本語だ"),
    (few("bullets", "exactly", 2), "* a\n- b\nc", "*a\n- b"),
    (few("highlights", "at least", 2), "*one* and **two**", "*one* and * two *"),
    (few("placeholders", "at least", 1), "Dear [name],", "Dear [] or ]name[,"),
    (few("sections", "at least", 2, marker="Section"), "SECTION 1 a\nSECTION 2 b", "SECTION 1 a"),
    ({"kind": "title"}, "<<A Day>>\nIt was …", "<A Day>\n<<>>"),
    ({"kind": "postscript", "marker": "P.S."}, "Bye.\nP.S. More", "Bye. P.S. More"),
    ({"kind": "paragraph_start", "index": 2, "word": "then"}, "First a.\n\nThen b.", "Then a.\n\nFirst b."),
    ({"kind": "paragraph_start", "index": 3, "word": "then"}, "a\n\nb\n\nthen c", "then\n\nthen"),
    ({"kind": "json"}, '{"a": [1]}', "{'a': 1}"),
    ({"kind": "json"}, '```json\n{"a": 1}\n```', '```json\n{"a": 1}\n``` there'),
    ({"kind": "json"}, "[]", "[" * 50_000),
    ({"kind": "quoted"}, '"So it is."', 'He said "so"'),
    ({"kind": "quoted"}, "“So it is.”", '"'),
    ({"kind": "upper_case"}, "LOUD 1!", "Loud"),
    ({"kind": "upper_case"}, "ÄÖ", "123"),
    ({"kind": "lower_case"}, "quiet 1!", "Quiet"),
    (few("capital_words", "at least", 2), "NASA and ESA", "NASA and I"),
    ({"kind": "starts_with", "phrase": "Dear"}, " dear reader", "My dear"),
    ({"kind": "ends_with", "phrase": "The end."}, "So: the end.\n", "The end. Really."),
    ({"kind": "no_commas"}, "a; b", "a, b"),
    ({"kind": "no_commas"}, "a b", "a，b"),
    ({"kind": "one_of", "options": ["Yes", "No"]}, " yes\n", "Yes or no"),
    ({"kind": "ascii"}, "plain", "naïve"),
]


@pytest.mark.parametrize(("instruction", "good", "bad"), CASES)
def test_every_kind_of_instruction(instruction: dict[str, Any], good: str, bad: str) -> None:
    scores = [IFBench()(episode("something else", text, instructions=[instruction])) for text in (good, bad)]
    assert scores == [1.0, 0.0]


def test_every_kind_has_a_case() -> None:
    assert {instruction["kind"] for instruction, _, _ in CASES} == set(CHECKS)


THREE = [few("words", "at most", 3), {"kind": "no_commas"}, {"kind": "lower_case"}]


@pytest.mark.parametrize(
    ("action", "share", "every"),
    [
        ("one two three", 1.0, 1.0),
        ("One two three", 2 / 3, 0.0),
        ("One, two three", 1 / 3, 0.0),
        ("One, two three four", 0.0, 0.0),
        ("", 0.0, 0.0),
        (" \n", 0.0, 0.0),
        ("<think>One, two, three, four, five</think>one two", 1.0, 1.0),
        ("<think>one two", 0.0, 0.0),
        ("x" * 100_001, 0.0, 0.0),
    ],
)
def test_ifbench_scores_the_share_or_all(action: str, share: float, every: float) -> None:
    finished = episode(action, instructions=THREE)
    assert (IFBench()(finished), IFBench(score="all")(finished)) == (pytest.approx(share), every)


@pytest.mark.parametrize(
    ("instructions", "message"),
    [
        ([], r"info\['instructions'\] is \[\]; it must be a list of instructions such as"),
        ("no_commas", "is 'no_commas'; it must be a list"),
        ({"kind": "json"}, "it must be a list"),
        (["json"], "an instruction is 'json'; it must be a mapping with a 'kind'"),
        ([{"kind": "no_comma"}], "there is no kind 'no_comma'; did you mean 'no_commas'"),
        ([{"kind": "json", "count": 1}], r"'json' has the arguments \{'count': 1\}; it takes no arguments"),
        ([{"kind": "words", "count": 1}], r"it takes relation \(str\), count \(int\)"),
        ([few("words", "about", 3)], "relation of 'words' is 'about'; it must be one of 'at least', 'at most'"),
        ([few("words", "at most", True)], r"it takes relation \(str\), count \(int\)"),
        ([{"kind": "include", "phrases": "cat"}], r"it takes phrases \(list\)"),
        ([{"kind": "include", "phrases": []}], r"it takes phrases \(list\)"),
        ([{"kind": "include", "phrases": [1]}], r"it takes phrases \(list\)"),
        ([{"kind": "starts_with", "phrase": ""}], r"it takes phrase \(str\)"),
    ],
)
def test_wrong_instructions_leave_the_episode_unscored(instructions: Any, message: str) -> None:
    with pytest.raises(RewardError, match=f"ifbench: .*{message}"):
        IFBench()(episode("a", instructions=instructions))


def test_bad_options_are_refused() -> None:
    with pytest.raises(RewardError, match="ifbench: score is 'mean'; it must be one of 'share', 'all'"):
        IFBench(score="mean")


def test_a_crafted_answer_is_checked_soon() -> None:
    every = [instruction for instruction, _, _ in CASES]
    started = time.process_time()
    for piece in ("a", "a ", "*", "* a", "[", "<<", "\n \n", "\n", ".", "'", "- ", "A-", '"', "```json\n"):
        assert 0 <= IFBench()(episode(piece * (100_000 // len(piece)), instructions=every)) < 1
    assert time.process_time() - started < 20


# --- noise -----------------------------------------------------------------------------------------------------------


def test_random_repeats_itself_for_an_episode_and_differs_between_them() -> None:

    one = episode("a")
    episodes = [dataclasses.replace(one, episode_id=f"e{number}") for number in range(2000)]
    scores = [Random()(each) for each in episodes]
    assert scores == [Random()(each) for each in episodes]
    assert len(set(scores)) == 2000 and min(scores) >= 0 and max(scores) < 1
    assert sum(scores) / 2000 == pytest.approx(0.5, abs=0.03)  # four standard deviations
    assert Random()(one) == Random()(episode("something else", answer=1))
    assert Random(seed=1)(one) != Random()(one)
    task = dataclasses.replace(one.task, seed=1)
    assert Random()(dataclasses.replace(one, task=task)) != Random()(one)


@pytest.mark.parametrize(
    ("options", "low", "high"),
    [({}, 0, 1), ({"low": -1}, -1, 1), ({"low": 2, "high": 3}, 2, 3), ({"low": -5.0, "high": -4.5}, -5, -4.5)],
)
@pytest.mark.parametrize("seed", range(5))
def test_random_stays_in_its_range(options: dict[str, float], low: float, high: float, seed: int) -> None:
    score = Random(seed=seed, **options)(episode("a"))  # type: ignore[arg-type]
    assert low <= score < high
    assert score == pytest.approx(low + (high - low) * Random(seed=seed)(episode("a")), abs=1e-12)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Random(low=1), "random: low is 1 and high 1.0; low must be below high"),
        (lambda: Random(high=float("inf")), "high is inf"),
        (lambda: Random(seed=0.5), "seed is 0.5; it must be a whole number"),  # type: ignore[arg-type]
    ],
)
def test_random_refuses_bad_options(make: Any, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        make()


@pytest.mark.parametrize("reward", [IFBench(), Random()], ids=["ifbench", "random"])
def test_they_keep_the_contract_of_rewards(reward: Any) -> None:
    results = check_reward(reward, [episode("b", instructions=THREE), episode("", "A, b", instructions=THREE)])
    assert [result.name for result in results if not result.passed] == []
