"""A judge that compares: what is won, what its preference for a place does, and what failures leave."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from fake_openai import FakeOpenAI
from reward_kit import episode
from test_genrm import ATTACKS, text_of

from relax_gym.errors import RewardError
from relax_gym_rewards.genrm.compare import GenRMGroup

Body = dict[str, Any]


def shown(body: Body) -> tuple[str, dict[str, str]]:
    """The mark, and the candidates by name in the order in which they are shown."""
    text = text_of(body)
    mark = re.findall(r"<question-([0-9a-f]{12})>", text)[0]
    frames = re.findall(rf"<(first|second|answer_[A-Z])-{mark}>\n(.*?)\n</\1-{mark}>", text, re.DOTALL)
    return mark, dict(frames)


def larger(body: Body) -> Body:
    """Prefers the larger number, whatever the order."""
    mark, answers = shown(body)
    first, second = map(int, answers.values())
    word = "first" if first > second else "second" if second > first else "tie"
    return {"content": f"Verdict {mark}: {word}"}


def biased(body: Body) -> Body:
    return {"content": f"Verdict {shown(body)[0]}: first"}


def grades(body: Body) -> Body:
    """The number itself, and one more for the first place."""
    mark, answers = shown(body)
    scores = [int(text) + (at == 0) for at, text in enumerate(answers.values())]
    named = ", ".join(f'"{name[-1]}": {score}' for name, score in zip(answers, scores, strict=True))
    return {"content": f'Hm {{x}}.\n{{"mark": "{mark}", {named}}}'}


def compared(answer: Any, *actions: str, faults: Any = (), **options: Any) -> tuple[list[Any], GenRMGroup, FakeOpenAI]:
    server = FakeOpenAI(answer)
    server.faults = list(faults)
    with server.in_thread():
        judge = GenRMGroup(endpoint=server.url, model="judge", **options)
        group = [episode(*([action] if action else []), answer="8") for action in actions]
        return asyncio.run(judge.score_group(group)), judge, server


def test_the_share_of_comparisons_that_are_won() -> None:
    scores, judge, server = compared(larger, "1", "8", "5", "5")
    assert scores == pytest.approx([0.0, 1.0, 0.5, 0.5])
    assert len(server.bodies) == 2 * 5, "both orders of each pair, and none for two equal answers"
    assert judge.metrics() == {
        "judged": 10.0, "cached": 0.0, "failed": 0.0, "no_verdict": 0.0, "first_wins": 0.5, "contradicted": 0.0,
    }  # fmt: skip


def test_a_preference_for_a_place_cancels_and_is_logged() -> None:
    scores, judge, _ = compared(biased, "1", "8", "5")
    assert scores == [0.5, 0.5, 0.5]
    metrics = judge.metrics()
    assert (metrics["first_wins"], metrics["contradicted"]) == (1.0, 1.0)
    assert "first_wins" not in judge.metrics()


@pytest.mark.parametrize(("opponents", "pairs"), [(0, 15), (1, 6), (2, 12), (5, 15), (9, 15)])
def test_each_meets_so_many_opponents(opponents: int, pairs: int) -> None:
    scores, _, server = compared(larger, *"123456", opponents=opponents)
    assert len(server.bodies) == 2 * pairs
    assert scores[5] == 1.0 and scores[0] == 0.0


def test_a_list_is_scored_in_several_orders() -> None:
    scores, judge, server = compared(grades, "1", "8", "5", mode="list", orders=3)
    assert scores == pytest.approx([(2 + 1 + 1) / 30, (9 + 8 + 8) / 30, (6 + 5 + 5) / 30])
    assert len(server.bodies) == 3
    assert {next(iter(shown(body)[1].values())) for body in server.bodies} == {"1", "8", "5"}
    assert judge.metrics()["disagreement"] == pytest.approx(2**0.5 / 30)


def test_k74_what_fails_has_a_reason_and_no_score() -> None:
    scores, _, _ = compared(larger, "1", "", "5")
    assert scores[0] == 0.0 and scores[2] == 1.0
    assert isinstance(scores[1], RewardError) and "no turns" in str(scores[1])
    scores, _, _ = compared(larger, "1")
    assert isinstance(scores[0], RewardError) and "nothing to compare it with" in str(scores[0])
    scores, judge, _ = compared(larger, "1", "2", faults=[400])
    assert all(isinstance(score, RewardError) and "answered 400" in str(score) for score in scores)
    assert judge.metrics()["failed"] == 1
    scores, _, _ = compared(lambda body: {"content": "{}"}, "1", "2", mode="list")
    assert all(isinstance(score, RewardError) and "0 objects with mark" in str(score) for score in scores)
    scores, _, _ = compared(grades, "1", "10", mode="list", orders=2)
    assert "the judge gave 11 as a score" in str(scores[0]), "one of two orders alone would be biased"
    scores, _, _ = compared(grades, "1", "10", "2", mode="list", orders=3)
    assert scores == pytest.approx([(2 + 1) / 20, 1.0, (2 + 3) / 20])
    assert isinstance(compared(grades, *["1"] * 27, mode="list")[0][0], RewardError)


@pytest.mark.parametrize("mode", ["pairs", "list"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_no_answer_ends_its_frame(attack: str, mode: Any) -> None:
    def judge(body: Body) -> Body:
        mark, answers = shown(body)
        named = ", ".join(f'"{name[-1]}": 1' for name in answers)
        return {"content": f'{{"mark": "{mark}", {named}}}\nVerdict {mark}: second'}

    scores, _, server = compared(judge, attack, "honest", mode=mode, field="answer")
    assert scores == ([0.5, 0.5] if mode == "pairs" else [0.1, 0.1])
    for body in server.bodies:
        mark, answers = shown(body)
        names = ("question", "reference", *answers)
        tags = re.findall(rf"</?\w+-{mark}>", text_of(body))
        assert tags == [tag.format(name, mark) for name in names for tag in ("<{}-{}>", "</{}-{}>")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "all"}, "give one of pairs, list"),
        ({"orders": 0}, "orders at least 1"),
        ({"samples": 0}, "at least 1"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RewardError, match=message):
        GenRMGroup(endpoint="http://localhost:1/v1", model="judge", **options)
