"""The loop on scripted samplers and a learner that keeps its batches: no model, every promise of the loop."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import faulty_envs  # noqa: F401 (registers its envs)
import numpy as np
import pytest
from train_cases import TOKENIZER, half_a, run, trainer

import relax_gym
from relax_gym.doctor import diagnose
from relax_gym.errors import SamplerError, TrainingError
from relax_gym.lines import read_lines
from relax_gym.plugins import plugins
from relax_gym.scoring import LOGGED_FAILURES
from relax_gym.testing import RecordingLearner
from relax_gym.types import Batch, Group, Trajectory


def versions(batch: Batch) -> set[int]:
    return {int(v) for sample in batch.samples for v in sample.versions[sample.loss_mask == 1]}


def test_k101_staleness_0_is_exactly_on_policy(tmp_path: Path) -> None:
    learner = RecordingLearner()
    loop = trainer(tmp_path, half_a, learner, delay=3)
    result = run(loop)
    assert [versions(batch) for batch in learner.batches] == [{0}, {1}, {2}]
    assert [batch.version for batch in learner.batches] == [0, 1, 2]
    assert [len(batch.samples) for batch in learner.batches] == [8, 8, 8]
    assert result.steps == 3
    sampler = loop._parts.sampler
    assert sampler.published == [0, 1, 2, 3]
    assert sampler.open_sessions == 0
    assert sampler.closed
    assert learner.closed == 1


@pytest.mark.parametrize("staleness", [1, 2, 5])
def test_k100_tokens_are_never_staler_than_the_bound(tmp_path: Path, staleness: int) -> None:
    learner = RecordingLearner()
    run(trainer(tmp_path, half_a, learner, delay=2, train={"steps": 8, "max_staleness": staleness}))
    lags = [batch.version - version for batch in learner.batches for version in versions(batch)]
    assert len(learner.batches) == 8
    assert max(lags) <= staleness
    assert max(lags) > 0  # they did overlap
    assert [s.group_id for s in learner.batches[1].samples[::4]] == ["2", "3"]


def test_k114_weights_are_published_before_the_first_request(tmp_path: Path) -> None:
    loop = trainer(tmp_path, half_a)
    seen: list[int] = []

    def script(prompt: Any, params: Any, turn: int) -> str:
        seen.append(loop._parts.sampler.version)
        return "a"

    loop._parts.sampler._script = script
    run(loop)
    assert min(seen) == 0


def test_groups_share_their_task_and_advantages_are_normalised(tmp_path: Path) -> None:
    learner = RecordingLearner()
    run(trainer(tmp_path, half_a, learner, train={"steps": 1}))
    for group in ("0", "1"):
        samples = [s for s in learner.batches[0].samples if s.group_id == group]
        assert len({tuple(s.token_ids[s.loss_mask == 0].tolist()) for s in samples}) == 1
        total = sum(float(s.advantages.max() + s.advantages.min()) for s in samples)
        assert abs(total) < 1e-5
    assert {s.episode_id for s in learner.batches[0].samples} == {f"{g}-{i}" for g in range(2) for i in range(4)}


def test_k76_zero_variance_groups_are_replaced_counted_and_kept_on_disk(tmp_path: Path) -> None:
    learner = RecordingLearner()
    loop = trainer(
        tmp_path,
        half_a,
        learner,
        env=[{"id": "test/OneOrTwo-v0", "kwargs": {"dull": 6}}],
        algorithm={"name": "grpo", "filter_zero_variance": True},
        train={"steps": 4, "groups_per_step": 4},
    )
    run(loop)
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    dropped = sum(line.get("queue/dropped_zero_variance", 0) for line in lines)
    episodes = read_lines(tmp_path / "run" / "episodes.jsonl")
    assert dropped >= 4
    assert len(episodes) == 4 * 4 * 4 + dropped * 4
    assert sum(e["kind"] == "zero_variance" for e in episodes) == dropped * 4
    for batch in learner.batches:
        assert {s.group_id.split("r")[0] for s in batch.samples} == {
            str(slot) for slot in range(batch.version * 4, batch.version * 4 + 4)
        }
        assert all(s.advantages.any() for s in batch.samples)


def mostly_a(group: Group) -> str | None:
    """A filter of the user's: why not to train on a group."""
    return None if np.nanmean(group.rewards) > 0.5 else "mostly_b"


def test_k76_the_users_filter_and_the_range_drop_count_and_replace(tmp_path: Path) -> None:
    learner = RecordingLearner()
    options = {"name": "grpo", "filter": "test_train:mostly_a", "filter_mean_range": [0.2, 0.9]}
    run(trainer(tmp_path, half_a, learner, algorithm=options, train={"steps": 4, "groups_per_step": 4}))
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    kinds = Counter(e["kind"] for e in read_lines(tmp_path / "run" / "episodes.jsonl"))
    reasons = ("mostly_b", "mean_below_range", "mean_above_range")
    counted = {reason: sum(line.get(f"queue/dropped_{reason}", 0) for line in lines) for reason in reasons}
    assert counted["mostly_b"] > 0
    assert counted["mean_below_range"] + counted["mean_above_range"] > 0
    assert {reason: kinds[reason] for reason in reasons} == {reason: 4 * n for reason, n in counted.items()}
    assert [len(batch.samples) for batch in learner.batches] == [16] * 4
    assert {
        sum(s.reward for s in batch.samples if s.group_id == g)
        for batch in learner.batches
        for g in {s.group_id for s in batch.samples}
    } == {3.0}


def test_a_group_that_stays_dull_leaves_its_slot_empty(tmp_path: Path) -> None:
    learner = RecordingLearner()
    loop = trainer(
        tmp_path,
        lambda *_: "b",
        learner,
        algorithm={"name": "grpo", "filter_zero_variance": True},
        train={"steps": 2, "max_replacements": 1, "max_empty_steps": 1},
    )
    run(loop)  # a filter that finds nothing to learn from is no fault
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["queue/empty_slots"] for line in lines] == [2, 2]
    assert [line["queue/dropped_zero_variance"] for line in lines] == [4, 4]
    assert [len(batch.samples) for batch in learner.batches] == [0, 0]


def test_steps_in_which_nothing_is_kept_go_on(tmp_path: Path) -> None:
    learner = RecordingLearner()
    options = {"name": "sft", "min_reward": 2.0}
    run(trainer(tmp_path, half_a, learner, algorithm=options, train={"steps": 2, "max_empty_steps": 1}))
    assert [len(batch.samples) for batch in learner.batches] == [0, 0]
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [(line["episode/count"], line["perf/tokens_per_second"]) for line in lines] == [(8, 0.0), (8, 0.0)]


def test_k29_steps_without_trainable_tokens_end_the_run_with_the_first_error(tmp_path: Path) -> None:
    loop = trainer(tmp_path, half_a, env=[{"id": "test/Faulty-v0", "kwargs": {"fault": "reset"}}])
    loop._config = loop._config.model_copy(
        update={"train": loop._config.train.model_copy(update={"max_empty_steps": 2})}
    )
    with pytest.raises(BaseExceptionGroup) as caught:
        run(loop)
    error = caught.value.exceptions[0]
    assert isinstance(error, TrainingError)
    assert "2 steps in a row without one trainable token, the last at step 2" in str(error)
    assert "the last error of an episode: ValueError: reset is broken" in str(error)


class Broken:
    """Fails in one of so many ways."""

    def __init__(self, ways: int = 1) -> None:
        self.ways, self.calls = ways, 0

    def __call__(self, trajectory: Trajectory) -> float:
        self.calls += 1
        raise KeyError(f"answer {self.calls % self.ways}")


@pytest.mark.parametrize(("ways", "logged"), [(1, 1), (1000, LOGGED_FAILURES)])
def test_why_rewards_fail_is_logged_and_said_when_the_run_ends(
    ways: int, logged: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rewards = [{"name": f"python:{__name__}:Broken", "kwargs": {"ways": ways}}]
    loop = trainer(tmp_path, half_a, reward=rewards, train={"max_empty_steps": 1})
    with pytest.raises(BaseExceptionGroup) as caught:
        run(loop)
    why = rf"reward \S*Broken: KeyError: 'answer \d+' \(.*{__name__}\.py:\d+\)"
    assert re.search(f"the last error of an episode: {why}", str(caught.value.exceptions[0]))
    assert re.fullmatch(why, str(diagnose(tmp_path / "run").last_error).partition("episode: ")[2].partition(";")[0])
    assert len([line for line in caplog.messages if re.fullmatch(f"test/OneOrTwo-v0, seed .*: {why}", line)]) == logged


class NoEval:
    """Scores training only."""

    def __call__(self, trajectory: Trajectory) -> float | None:
        return None if trajectory.episode_id.startswith("eval") else 1.0


def test_what_only_an_evaluation_cannot_score_is_no_last_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "relax_gym")
    name = f"python:{__name__}:NoEval"
    run(trainer(tmp_path, half_a, reward=[{"name": name}], train={"steps": 1}, eval={"episodes": 2}))
    assert [(r.levelname, r.message.partition(": ")[2]) for r in caplog.records] == [
        ("INFO", f"reward {name}: returned None; a reward is one finite number")
    ]
    assert diagnose(tmp_path / "run").last_error is None


def test_k74_an_unscored_episode_leaves_the_baseline_and_gets_advantage_0(tmp_path: Path) -> None:
    learner = RecordingLearner()
    run(trainer(tmp_path, half_a, learner, env=[{"id": "test/Nan-v0"}], train={"steps": 1}))
    assert all(s.advantages.tolist() == [0.0] * len(s.advantages) for s in learner.batches[0].samples)
    (line,) = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert line["episode/unscored"] > 0
    assert line["reward/mean"] == 1.0


def test_faulty_episodes_are_counted_and_training_goes_on(tmp_path: Path) -> None:
    learner = RecordingLearner()
    mixture = [{"id": "test/OneOrTwo-v0"}, {"id": "test/Faulty-v0", "kwargs": {"fault": "step"}}]
    run(trainer(tmp_path, half_a, learner, env=mixture, train={"steps": 4}))
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert sum(line.get("episode/errors", 0) + line.get("queue/dropped_unscored", 0) * 4 for line in lines) > 0
    failed = [e for e in read_lines(tmp_path / "run" / "episodes.jsonl") if e["error"]]
    assert failed
    assert {e["error"]["message"] for e in failed} == {"KeyError: 'lost item'"}
    assert {e["kind"] for e in failed} == {"unscored"}


def test_k90_a_replacement_is_another_task_in_a_fresh_env(tmp_path: Path) -> None:
    loop = trainer(
        tmp_path,
        half_a,
        env=[{"id": "test/OneOrTwo-v0", "kwargs": {"dull": 9}}],
        algorithm={"filter_zero_variance": True},
        train={"steps": 1},
    )
    run(loop)
    episodes = read_lines(tmp_path / "run" / "episodes.jsonl")
    groups = {e["episode_id"].rsplit("-", 1)[0]: e["seed"] for e in episodes}
    assert len(groups) > 2
    assert len(set(groups.values())) == len(groups)
    assert len({e["episode_id"] for e in episodes}) == len(episodes)
    assert all(e["group_id"] == f"{e['slot']}" + (f"r{e['attempt']}" if e["attempt"] else "") for e in episodes)


def test_each_env_of_a_mixture_may_have_its_own_algorithm(tmp_path: Path) -> None:
    learner = RecordingLearner()
    plain = {"id": "test/OneOrTwo-v0", "algorithm": {"name": "grpo", "scale": "none"}}
    mixture = [plain, {"id": "test/OneOrTwo-v0", "weight": 2.0}]
    run(trainer(tmp_path, half_a, learner, env=mixture, train={"steps": 1, "groups_per_step": 12}))
    samples = learner.batches[0].samples
    assert [s.group_id for s in samples] == [str(slot) for slot in range(12) for _ in range(4)]
    for mixture_index, largest in ((0, 0.75), (1, 1.5)):
        own = [float(s.advantages.max()) for s in samples if s.mixture == mixture_index and s.advantages.any()]
        assert own
        assert max(own) <= largest
        assert mixture_index == 0 or max(own) > 0.75


def test_k91_scoring_sees_the_last_turn_with_its_reward(tmp_path: Path) -> None:
    learner = RecordingLearner()
    loop = trainer(tmp_path, half_a, learner, env=[{"id": "test/Faulty-v0"}], train={"steps": 1})
    run(loop)
    assert [s.reward for s in learner.batches[0].samples] == [1.0] * 8
    assert [s.turn_rewards for s in learner.batches[0].samples] == [(0.0, 1.0)] * 8


def test_k109_a_broken_sampler_ends_the_run_at_once(tmp_path: Path) -> None:
    calls = 0

    def script(prompt: Any, params: Any, turn: int) -> str:
        nonlocal calls
        calls += 1
        if calls == 11:
            raise SamplerError("engine is gone")
        return "a"

    loop = trainer(tmp_path, script)
    with pytest.raises(BaseExceptionGroup) as caught:
        run(loop)
    assert caught.group_contains(SamplerError, match="engine is gone")
    assert loop._parts.sampler.closed


def test_k109_a_broken_learner_ends_the_run_at_once(tmp_path: Path) -> None:
    class Broken(RecordingLearner):
        def step(self, batch: Batch) -> dict[str, float]:
            raise TrainingError("loss is nan")

    with pytest.raises(BaseExceptionGroup) as caught:
        run(trainer(tmp_path, half_a, Broken(), train={"max_staleness": 2}))
    assert caught.group_contains(TrainingError, match="loss is nan")


def test_evaluation_before_during_and_after_on_held_out_seeds(tmp_path: Path) -> None:
    loop = trainer(tmp_path, lambda *_: "a", train={"steps": 5}, eval={"every": 2, "episodes": 3})
    result = run(loop)
    assert [step for step, _ in result.evaluations] == [0, 2, 4, 5]
    assert all(metrics["eval/reward"] == 1.0 for _, metrics in result.evaluations)
    episodes = read_lines(tmp_path / "run" / "episodes.jsonl")
    held_out = {e["seed"] for e in episodes if e["kind"] == "eval"}
    assert len(held_out) == 3
    assert not held_out & {e["seed"] for e in episodes if e["kind"] == "train"}
    greedy = [r.params.temperature for r in loop._parts.sampler.requests][:3]
    assert greedy == [0.0, 0.0, 0.0]


def test_warm_up_imitates_the_expert(tmp_path: Path) -> None:
    learner = RecordingLearner()
    run(trainer(tmp_path, half_a, learner, warmup={"steps": 2, "episodes_per_step": 3}))
    assert [len(batch.samples) for batch in learner.imitated] == [3, 3]
    sample = learner.imitated[0].samples[0]
    assert TOKENIZER.decode(sample.token_ids[sample.loss_mask == 1].tolist()) == "a<|im_end|>"
    assert learner.version == 3


def test_checkpoints_every_n_steps_and_at_the_end(tmp_path: Path) -> None:
    run(trainer(tmp_path, half_a, train={"steps": 5}, checkpoint={"every": 2, "keep": 2}))
    folders = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert folders == ["step-000004", "step-000005"]
    assert (tmp_path / "run" / "checkpoints" / "step-000005" / "tokenizer.json").exists()


def test_observers_see_the_whole_run(tmp_path: Path) -> None:
    class Observer:
        def __init__(self) -> None:
            self.seen: list[str] = []

        @relax_gym.hookimpl
        def on_run_start(self, context: Any) -> None:
            self.seen.append("start")

        @relax_gym.hookimpl
        def on_episode_end(self, step: int, trajectory: Any, evaluation: bool) -> None:
            self.seen.append(f"{'eval' if evaluation else 'episode'} {step}")

        @relax_gym.hookimpl
        def on_batch(self, batch: Any) -> None:
            self.seen.append("batch")

        @relax_gym.hookimpl
        def on_step_end(self, step: int, metrics: Any) -> None:
            self.seen.append(f"step {step}")

        @relax_gym.hookimpl
        def on_checkpoint(self, step: int, folder: Any) -> None:
            self.seen.append(f"checkpoint {step}")

        @relax_gym.hookimpl
        def on_run_end(self, context: Any) -> None:
            self.seen.append("end")

    observer = Observer()
    plugins().manager.register(observer)
    try:
        run(trainer(tmp_path, half_a, train={"steps": 1, "groups_per_step": 1}, eval={"episodes": 1}))
    finally:
        plugins().manager.unregister(observer)
    assert observer.seen == [
        "start",
        "eval 0",
        *["episode 1"] * 4,
        "batch",
        "eval 1",
        "step 1",
        "checkpoint 1",
        "end",
    ]


def test_the_curve_is_a_picture(tmp_path: Path) -> None:
    from relax_gym.curve import draw_curve

    lines = [{"step": 0, "eval/reward": 0.1}, {"step": 1, "reward/mean": 0.2}, {"step": 2, "reward/mean": None}]
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    draw_curve(tmp_path / "m.jsonl", tmp_path / "reward.png")
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
