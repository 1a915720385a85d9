"""What the loop does with a reward beyond its score: its other numbers, its counters, its end."""

from pathlib import Path
from typing import Any

import pytest
from train_cases import TOKENIZER, half_a, run, trainer

from relax_gym.lines import read_lines
from relax_gym.plugins import plugins
from relax_gym.testing import ScriptedSampler

made: list["Judge"] = []


class Judge:
    """Gives two numbers for an episode, counts what it judged, and notes when it is closed."""

    def __init__(self) -> None:
        self.judged = self.closed = 0
        made.append(self)

    def __call__(self, trajectory: Any) -> dict[str, float]:
        self.judged += 1
        return {"accuracy": trajectory.env_return, "length": float(len(trajectory.turns))}

    def metrics(self) -> dict[str, float]:
        judged, self.judged = self.judged, 0
        return {"judged": judged}

    async def close(self) -> None:
        self.closed += 1


class Members:
    """How many are in the group."""

    key = "members"

    def score_group(self, trajectories: Any) -> list[dict[str, float]]:
        return [{"members": len(trajectories), "at": at} for at in range(len(trajectories))]


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    plugins().tables["reward"].add("test_judge", Judge, "test")
    plugins().tables["reward"].add("test_members", Members, "test")


def test_parts_and_counters_are_logged_and_the_reward_is_closed(tmp_path: Path) -> None:
    made.clear()
    reward = [{"name": "test_judge", "key": "accuracy", "weight": 2.0}]
    result = run(trainer(tmp_path, half_a, reward=reward, eval={"episodes": 3, "every": 1}))
    assert result.metrics["reward/test_judge/length"] == 1.0
    assert result.metrics["reward/mean"] == result.metrics["reward/test_judge"]
    lines = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if line["step"]]
    assert [line["reward/test_judge/judged"] for line in lines] == [8.0] * 3  # evaluation's are not among them
    episode = read_lines(tmp_path / "run" / "episodes.jsonl")[0]
    assert episode["reward_parts"] == {"test_judge/length": 1.0}
    assert [judge.closed for judge in made] == [1]


class Counts(ScriptedSampler):
    """Counts requests."""

    def __init__(self, **options: Any) -> None:
        super().__init__(half_a, tokenizer=TOKENIZER, **options)
        self.reported = 0

    def metrics(self) -> dict[str, float]:
        before, self.reported = self.reported, len(self.requests)
        return {"requests": float(self.reported - before)}


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_what_is_counted_during_an_evaluation_is_reported(tmp_path: Path, max_staleness: int) -> None:
    """By itself where nothing else is played meanwhile, else with what the next step counts."""
    sampler = Counts(delay=3)
    size = {"steps": 6, "max_staleness": max_staleness}
    run(trainer(tmp_path, None, sampler=sampler, train=size, eval={"episodes": 5, "every": 1}))
    first, *lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert first["eval/sampler/requests"] == lines[-1]["eval/sampler/requests"] == 5
    counted = [line["sampler/requests"] for line in lines]
    apart = [line.get("eval/sampler/requests", 0) for line in (first, *lines)]
    assert sum(counted) + sum(apart) == len(sampler.requests) == 6 * 8 + 7 * 5
    if not max_staleness:
        assert (counted, apart) == ([8] * 6, [5] * 7)


def test_groups_are_scored_as_groups_in_training_and_evaluation(tmp_path: Path) -> None:
    reward = [{"name": "env"}, {"name": "test_members", "weight": 10.0}]
    result = run(trainer(tmp_path, half_a, reward=reward, eval={"episodes": 3, "every": 1}))
    assert result.metrics["reward/test_members"] == 40.0
    episodes = read_lines(tmp_path / "run" / "episodes.jsonl")
    trained = [one for one in episodes if one["kind"] == "train"]
    assert [one["rewards"]["test_members"] for one in trained] == [40.0] * 24
    assert [one["reward_parts"]["test_members/at"] for one in trained[:4]] == [0.0, 1.0, 2.0, 3.0]
    held_out = [one for one in episodes if one["kind"] == "eval"]
    assert {one["rewards"]["test_members"] for one in held_out} == {10.0}, "each is a task of its own"
