"""A reward behind HTTP: what is sent, what is taken for a score, what is tried again, what stays secret."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from reward_kit import episode

from relax_gym.errors import ConfigError, RewardError
from relax_gym.scoring import WeightedReward, score
from relax_gym.types import Trajectory
from relax_gym_rewards.remote import Remote

Answer = Callable[[], web.StreamResponse]


def ask(*answers: Answer, **options: Any) -> tuple[Trajectory, list[tuple[Any, Any]]]:
    """The scored episode of two turns, and the headers and bodies of all requests; the last answer repeats."""
    seen: list[tuple[Any, Any]] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        seen.append((request.headers, await request.json()))
        return answers[min(len(seen), len(answers)) - 1]()

    async def main() -> Trajectory:
        app = web.Application()
        app.router.add_post("/score", handle)
        async with TestServer(app) as server:
            reward = Remote(url=str(server.make_url("/score")), **{"backoff": 0.0, **options})
            term = WeightedReward(name="r", weight=2.0, key="score", reward=reward)
            return await score(episode("a", "b", answer="\udc80"), [term], timeout=30)

    return asyncio.run(main()), seen


def says(value: Any, status: int = 200, **headers: str) -> Answer:
    return lambda: web.json_response(value, status=status, headers=headers)


def text(value: str) -> Answer:
    return lambda: web.Response(text=value)


def drop() -> web.StreamResponse:
    raise asyncio.CancelledError  # the connection ends without an answer


def test_an_answer_that_comes_in_pieces_is_read_to_its_end() -> None:
    found, seen = ask(text(" " * 900_000 + "0.5"))
    assert (found.reward, len(seen)) == (1.0, 1)


def test_an_answer_that_is_too_long_is_not_asked_for_again() -> None:
    found, seen = ask(text(" " * 2**20 + "0.5"))
    assert "answered with more than 1048576 bytes; give a score only" in found.reward_failures["r"]
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("answer", "expected"), [(0.5, 1.0), (1, 2.0), ([0.25, 0.5], 1.5), ({"score": 0.5, "style": 3}, 1.0)], ids=repr
)
def test_what_the_service_says_is_the_score(answer: Any, expected: float) -> None:
    found, seen = ask(says(answer))
    assert found.reward == expected
    ((_, body),) = seen
    assert [turn["action"] for turn in body["turns"]] == ["a", "b"] and body["env_id"] == "test/Quiz-v0"
    assert found.reward_parts == ({"r/style": 3.0} if isinstance(answer, dict) else {})


@pytest.mark.parametrize(
    ("answers", "requests"),
    [
        ([says({"error": "busy"}, 503), says({"error": "slow down"}, 429), says(1.0)], 3),
        ([text("<html>"), says(1.0)], 2),
        ([drop, says(1.0)], 2),
    ],
    ids=["status", "no JSON", "dropped"],
)
def test_what_may_pass_is_tried_again(answers: list[Answer], requests: int) -> None:
    found, seen = ask(*answers)
    assert (found.reward, len(seen)) == (2.0, requests)


@pytest.mark.parametrize(
    ("answer", "options", "requests", "reason"),
    [
        (says({"error": "busy"}, 500), {"retries": 2}, 3, r"answered 500: busy \(tried 3 times\)"),
        (says("x", 503, **{"Retry-After": "3600"}), {}, 1, r"tried 1 times"),
        (says({"detail": "who?"}, 401), {}, 1, "answered 401: who\\?; 200 with a score is expected"),
        (says(None), {}, 1, "returned None"),
        (says("good"), {}, 1, "returned 'good'"),
        (text("NaN"), {}, 1, "returned nan"),
        (says({"points": 1}), {}, 1, "returned nothing under key = 'score'"),
        (says([1.0]), {}, 1, "returned 1 numbers for 2 turns"),
        (text("[" * 100_000), {"retries": 0}, 1, "with no JSON"),
    ],
)
def test_k74_a_failure_is_unscored_with_its_reason(
    answer: Answer, options: dict[str, Any], requests: int, reason: str
) -> None:
    found, seen = ask(answer, **options)
    assert found.reward is None and len(seen) == requests
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(found.reward_failures["r"])


def test_k122_the_key_is_sent_and_shown_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCORER_KEY", "s3cret")
    found, seen = ask(says({"error": "bad key s3cret"}, 403), key_env="SCORER_KEY")
    assert seen[0][0]["Authorization"] == "Bearer s3cret"
    assert "answered 403" in found.reward_failures["r"] and "s3cret" not in found.reward_failures["r"]


def test_nobody_there() -> None:
    reward = Remote(url="http://127.0.0.1:9/score", retries=1, backoff=0.0)
    with pytest.raises(RewardError, match=r"127.0.0.1:9.*tried 2 times"):
        asyncio.run(reward(episode("a")))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "localhost:1"}, "remote: url 'localhost:1' is no URL"),
        ({"url": "http://u:p@host/x"}, "remote: url for host holds a name, password or query"),
        ({"url": "http://host/", "timeout": 0}, "must be above 0"),
        ({"url": "http://host/", "key_env": "sk-1234"}, "key_env is no name"),
        ({"url": "http://host/", "key_env": "NOT_SET_ANYWHERE"}, "NOT_SET_ANYWHERE: the environment variable is not"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((RewardError, ConfigError), match=message):
        Remote(**options)
