"""Numbers of an evaluation, from records of episodes."""

from __future__ import annotations

from typing import Any

import pytest

from relax_gym.endpoint.statistics import estimate, pass_at_k, summarise


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [(5, 2, 3, 0.9), (5, 2, 1, 0.4), (5, 0, 3, 0.0), (5, 5, 3, 1.0), (5, 3, 3, 1.0), (10, 1, 5, 0.5), (4, 1, 4, 1.0)],
)
def test_pass_at_k(n: int, c: int, k: int, expected: float) -> None:
    assert pass_at_k(n, c, k) == pytest.approx(expected)


@pytest.mark.parametrize(("n", "c", "k"), [(2, 1, 3), (2, 3, 1), (2, 1, 0), (2, -1, 1)])
def test_pass_at_k_of_nonsense(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="must hold"):
        pass_at_k(n, c, k)


def test_the_standard_error_is_that_of_tasks() -> None:
    assert estimate([0.0, 1.0]) == {"mean": 0.5, "stderr": pytest.approx(0.5), "tasks": 2}
    assert estimate([0.0, 0.5, 1.0, 0.5]) == {"mean": 0.5, "stderr": pytest.approx((0.5 / 3 / 4) ** 0.5), "tasks": 4}
    assert estimate([1.0]) == {"mean": 1.0, "stderr": None, "tasks": 1}
    assert estimate([]) is None


def record(slot: int, attempt: int, correct: bool | None, fault: str | None = None) -> dict[str, Any]:
    return {
        "slot": slot,
        "attempt": attempt,
        "correct": correct,
        "fault": fault,
        "reward": None if fault else float(bool(correct)),
        "usage": {"prompt": 10, "completion": 1},
        "seconds": 1.0,
        "stop_reason": "error" if fault else "env_done",
        "turns": 2,
    }


def test_summary() -> None:
    found = summarise(
        [
            record(0, 0, True), record(0, 1, False), record(0, 2, None, "env"),
            record(1, 0, True), record(1, 1, None, "request"), record(1, 2, True),
        ],
        (1, 2, 3),
    )  # fmt: skip
    assert found["errors"] == {"request": 1, "env": 1}
    assert found["unscored"] == 1
    assert found["reward"] == {"mean": 0.75, "stderr": pytest.approx(0.25), "tasks": 2}
    assert found["accuracy"]["mean"] == pytest.approx((1 / 3 + 1) / 2)  # an env's fault counts as not solved
    assert found["pass@k"]["1"]["mean"] == pytest.approx((1 / 3 + 1) / 2)
    assert found["pass@k"]["2"]["mean"] == pytest.approx((2 / 3 + 1) / 2)
    assert found["pass@k"]["3"] == {"mean": 1.0, "stderr": None, "tasks": 1}  # the other task has two that count
    assert (found["tasks"], found["episodes"], found["prompt_tokens"], found["seconds"]) == (2, 6, 60, 6.0)
    assert found["stop"] == {"env_done": 4, "error": 2}


def test_an_env_that_does_not_say_what_is_correct_has_no_accuracy() -> None:
    found = summarise([record(0, 0, None)], (1,))
    assert found["accuracy"] is None
    assert found["pass@k"] == {"1": None}
