"""The loop's modes: groups as they are ready, over-sampling, weights that are published every few steps, preparing."""

import asyncio
import dataclasses
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from train_cases import TOKENIZER, half_a, run, trainer

import relax_gym
from relax_gym.algorithm import FloatArray
from relax_gym.errors import ConfigError, TrainingError
from relax_gym.lines import read_lines
from relax_gym.run_folder import RunFolder
from relax_gym.testing import RecordingLearner, ScriptedSampler
from relax_gym.train import Trainer
from relax_gym.types import Batch, Metrics, TrainingSample
from relax_gym_trainers.algorithms.reinforce_pp import ReinforcePP


class Tail(relax_gym.Env):
    """Every third task takes `passes` turns of the event loop, the others none."""

    def __init__(self, passes: int = 30, share: int = 3) -> None:
        self.passes, self.share = passes, share

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.slow = (seed or 0) % self.share == 0
        return relax_gym.user("a or b?"), {}

    async def step(self, action: str) -> Any:
        for _ in range(self.passes if self.slow else 0):
            await asyncio.sleep(0)
        return relax_gym.StepResult([], float(action == "a"), True, False, {})


if "test/Tail-v0" not in relax_gym.list():
    relax_gym.register("test/Tail-v0", Tail)


def resumed(loop: Trainer, learner: RecordingLearner, *, step: int) -> Trainer:
    """The run of `loop` from its checkpoint after a step."""
    parts, folder = loop._parts, RunFolder(loop._config, resume=True)
    sampler = ScriptedSampler(half_a, tokenizer=TOKENIZER, delay=1)
    context = dataclasses.replace(parts.context, start_step=step)
    parts = dataclasses.replace(parts, context=context, sampler=sampler)
    return Trainer(parts, learner, [], folder, dict(folder.checkpoints())[step])


def lags(learner: RecordingLearner) -> list[int]:
    return [
        batch.version - int(version)
        for batch in learner.batches
        for sample in batch.samples
        for version in sample.versions[sample.loss_mask == 1]
    ]


def slots(batch: Batch) -> list[int]:
    """The slots of a batch's groups, whatever was aborted or replaced before."""
    names = dict.fromkeys(sample.group_id for sample in batch.samples)
    return [int(name.split("a")[0].split("r")[0]) for name in names]


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("oversample", [0, 1, 3])
def test_k99_k100_groups_as_they_are_ready_keep_the_bound_and_are_all_accounted_for(
    tmp_path: Path, staleness: int, oversample: int
) -> None:
    learner = RecordingLearner()
    options = {"steps": 8, "max_staleness": staleness, "order": "ready", "oversample": oversample}
    loop = trainer(tmp_path, half_a, learner, delay=1, env=[{"id": "test/Tail-v0"}], train=options)
    run(loop)
    loop._queue.check()
    account = loop._queue.account()
    trained = [slot for batch in learner.batches for slot in slots(batch)]
    assert [len(slots(batch)) for batch in learner.batches] == [2] * 8
    assert len(set(trained)) == 16  # no slot twice
    assert max(lags(learner)) <= staleness
    assert (account.consumed, account.in_flight, account.queued) == (16, 0, 0)
    assert account.dropped["late"] <= 8 * oversample
    assert set(range(max(trained) + 1)) - set(trained) <= set(loop._queue.unfinished)  # none is left out for good
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert sum(line.get("queue/dropped_late", 0) for line in lines) == account.dropped["late"]
    sampler = loop._parts.sampler
    assert sampler.open_sessions == 0


def test_on_policy_oversampling_takes_what_is_first_and_gives_the_rest_another_chance(tmp_path: Path) -> None:
    learner = RecordingLearner()
    options = {"steps": 6, "order": "ready", "oversample": 2}
    env = [{"id": "test/Tail-v0", "kwargs": {"passes": 300}}]
    loop = trainer(tmp_path, half_a, learner, env=env, train=options)
    run(loop)
    late = loop._queue.account().dropped["late"]
    assert set(lags(learner)) == {0}
    assert 0 < late <= 12
    again = [s.group_id for batch in learner.batches for s in batch.samples if "a" in s.group_id]
    assert again  # an aborted slot was played anew, and trained on


def test_k104_a_slot_played_again_has_nothing_of_before(tmp_path: Path) -> None:
    learner = RecordingLearner()
    env = [{"id": "test/Tail-v0", "kwargs": {"passes": 50}}]
    options = {"steps": 6, "order": "ready", "oversample": 2}
    loop = trainer(tmp_path, half_a, learner, env=env, train=options)
    run(loop)
    seeds: dict[str, Counter[int]] = {}
    for request in loop._parts.sampler.requests:
        seeds.setdefault(str(request.params.seed), Counter())[request.session] += 1
    assert all(len(sessions) == 1 for sessions in seeds.values())  # another seed and session each time
    for batch in learner.batches:
        for sample in batch.samples:
            assert set(sample.versions[sample.loss_mask == 1]) == {batch.version}


def test_a_slow_env_keeps_its_share_of_the_batches(tmp_path: Path) -> None:
    learner = RecordingLearner()
    slow, quick = ({"id": "test/Tail-v0", "kwargs": {"passes": n, "share": 1}} for n in (200, 0))
    options = {"steps": 20, "group_size": 2, "max_staleness": 2, "order": "ready", "oversample": 1}
    loop = trainer(tmp_path, half_a, learner, env=[slow, quick], train=options)
    run(loop)
    seen: Counter[int] = Counter()
    due: Counter[int] = Counter()
    for step, batch in enumerate(learner.batches):
        seen.update(loop._parts.tasks.mixture(slot) for slot in slots(batch))
        due.update(loop._parts.tasks.mixture(slot) for slot in (2 * step, 2 * step + 1))
        assert abs(seen[0] - due[0]) <= 3 * 2 + 1
    assert loop._queue.account(0).consumed == seen[0]
    assert loop._queue.account(1).consumed == seen[1]


@pytest.mark.parametrize(("every", "staleness"), [(2, 0), (2, 1), (3, 0)])
def test_weights_are_published_every_few_steps(tmp_path: Path, every: int, staleness: int) -> None:
    learner = RecordingLearner()
    options = {"steps": 6, "update_every": every, "max_staleness": staleness}
    loop = trainer(tmp_path, half_a, learner, delay=2, train=options)
    run(loop)
    assert loop._parts.sampler.published == list(range(6 // every + 1))
    assert [batch.version for batch in learner.batches] == [step // every for step in range(6)]
    assert max(lags(learner)) <= staleness
    if staleness == 0:
        assert set(lags(learner)) == {0}


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"train": {"oversample": 1}}, "oversample = 1 with order = 'slot'.*set order = 'ready'"),
        ({"train": {"steps": 3, "update_every": 2}}, "steps = 3 is no multiple of update_every = 2"),
        (
            {"train": {"steps": 4, "update_every": 2}, "checkpoint": {"every": 3}},
            r"checkpoint.every = 3 is no multiple of train.update_every = 2",
        ),
    ],
)
def test_k119_what_does_not_go_together_is_refused(tmp_path: Path, sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        trainer(tmp_path, half_a, **sections)


class Prepares(RecordingLearner):
    """Notes what it was given to prepare before each step."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self.advantages: dict[str, list[float]] = {}

    def prepare(self, samples: Any) -> None:
        self.advantages |= {sample.episode_id: sample.advantages.tolist() for sample in samples}
        self.events += dict.fromkeys(f"prepared {sample.group_id}" for sample in samples)

    def step(self, batch: Batch) -> Metrics:
        self.events.append(f"step {self.version}")
        return super().step(batch)

    def weights(self) -> Any:
        self.events.append(f"weights {self.version}")
        yield from ()


def test_what_is_there_is_prepared_while_a_step_waits_and_never_beside_a_publication(tmp_path: Path) -> None:
    learner = Prepares()
    env = [{"id": "test/Tail-v0", "kwargs": {"passes": 20, "share": 2}}]
    options = {"steps": 4, "groups_per_step": 4, "max_staleness": 1}
    run(trainer(tmp_path, half_a, learner, env=env, train=options))
    prepared = [event for event in learner.events if event.startswith("prepared")]
    assert prepared  # how many depends on which groups end last
    assert len(set(prepared)) == len(prepared)
    for step in range(4):  # between the weights of a version and the step that trains on it
        first, last = learner.events.index(f"weights {step}"), learner.events.index(f"step {step}")
        inside = learner.events[first + 1 : last]
        assert all(event.startswith("prepared") for event in inside)
        assert {int(event.split()[1]) for event in inside} <= set(range(4 * step, 4 * step + 4))
    trained = {sample.episode_id: sample.advantages.tolist() for batch in learner.batches for sample in batch.samples}
    assert learner.advantages.items() <= trained.items()
    assert any(any(values) for values in learner.advantages.values())


def test_what_an_algorithm_does_over_a_batch_it_does_over_batches_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    whole = ReinforcePP.batch_advantages

    def noted(self: ReinforcePP, advantages: FloatArray) -> FloatArray:
        seen.append(len(advantages))
        return whole(self, advantages)

    monkeypatch.setattr(ReinforcePP, "batch_advantages", noted)
    learner = Prepares()
    env = [{"id": "test/Tail-v0", "kwargs": {"passes": 20, "share": 2}}]
    options = {"steps": 4, "groups_per_step": 4, "max_staleness": 1}
    run(trainer(tmp_path, half_a, learner, env=env, algorithm={"name": "reinforce_pp"}, train=options))
    assert any(event.startswith("prepared") for event in learner.events)
    assert seen == [batch.trained_tokens for batch in learner.batches]


def test_learners_may_prepare_for_longer_than_groups_are_waited_for(tmp_path: Path) -> None:
    class Slow(RecordingLearner):
        def prepare(self, samples: list[TrainingSample]) -> None:
            prepared.append(len(samples))
            time.sleep(0.4)

    prepared: list[int] = []
    env = [{"id": "test/Tail-v0", "kwargs": {"passes": 20, "share": 2}}]
    options = {"steps": 2, "groups_per_step": 4}
    assert run(trainer(tmp_path, half_a, Slow(), env=env, train=options, supervision={"rollout": 0.3})).steps == 2
    assert prepared


def test_what_cannot_be_prepared_ends_the_run(tmp_path: Path) -> None:
    class Broken(RecordingLearner):
        def prepare(self, samples: list[TrainingSample]) -> None:
            raise TrainingError("the reference is nan")

    env = [{"id": "test/Tail-v0", "kwargs": {"share": 2}}]
    with pytest.raises(BaseExceptionGroup) as caught:
        run(trainer(tmp_path, half_a, Broken(), env=env, train={"groups_per_step": 4}))
    assert caught.group_contains(TrainingError, match="reference is nan")


def test_k109_a_bug_in_a_group_ends_the_run(tmp_path: Path) -> None:
    loop = trainer(tmp_path, half_a, train={"max_staleness": 2, "order": "ready"})

    async def fails(*_: Any) -> Any:
        raise ZeroDivisionError("a bug")

    loop._producer._play_group = fails
    with pytest.raises(BaseExceptionGroup) as caught:
        run(loop)
    assert caught.group_contains(ZeroDivisionError)


def test_no_more_groups_are_in_flight_than_the_sampler_has_memory_for(tmp_path: Path) -> None:
    learner = RecordingLearner()
    loop = trainer(tmp_path, half_a, learner, delay=3, train={"steps": 10, "max_staleness": 3, "group_size": 2})
    sampler = loop._parts.sampler
    most: list[int] = []

    class Small(type(sampler)):  # type: ignore[misc]
        capacity = 80  # one group of two short episodes, and not two

        def open_session(self) -> Any:
            most.append(loop._queue.in_flight)
            return super().open_session()

    sampler.__class__ = Small
    run(loop)
    assert max(most[:16]) > 2  # before anything is known
    assert max(most[-10:]) == 1


@pytest.mark.parametrize("last", [2, 4])
@pytest.mark.parametrize(("staleness", "oversample"), [(4, 0), (4, 2), (1, 2), (0, 1)])
def test_k113_a_run_that_goes_on_trains_on_every_slot_once_whatever_overtook_what(
    tmp_path: Path, staleness: int, oversample: int, last: int
) -> None:
    class Breaks(RecordingLearner):
        def step(self, batch: Batch) -> Metrics:
            if self.version == last:
                raise TrainingError("enough")
            return super().step(batch)

    sections = {
        "env": [{"id": "test/Tail-v0", "kwargs": {"passes": 120}}],
        "train": {"steps": 10, "max_staleness": staleness, "order": "ready", "oversample": oversample},
        "checkpoint": {"every": 1},
    }
    first, second = Breaks(), RecordingLearner()
    loop = trainer(tmp_path, half_a, first, **sections)
    with pytest.raises(BaseExceptionGroup):
        run(loop)
    before = [slot for batch in first.batches for slot in slots(batch)]
    assert len(before) == 2 * last
    again = resumed(loop, second, step=last)
    run(again)
    after = [slot for batch in second.batches for slot in slots(batch)]
    assert len(set(before + after)) == 20  # no slot twice
    owed = set(range(20)) - set(before + after)
    assert len(owed) <= oversample
    assert owed <= set(again._queue.unfinished)  # and none lost
    assert [batch.version for batch in second.batches] == list(range(last, 10))
    assert max(lags(second)) <= staleness
