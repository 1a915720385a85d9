"""How a run starts and ends when something goes wrong: what is closed, what is kept, what the user sees."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from train_cases import TOKENIZER, half_a, run, trainer

import relax_gym
from relax_gym.config import parse_config
from relax_gym.errors import ModelError, RunFolderError, SamplerError, TrainingError
from relax_gym.lines import read_lines
from relax_gym.plugins import plugins
from relax_gym.sampler import Session, Weights
from relax_gym.testing import RecordingLearner, ScriptedSampler
from relax_gym.train import train
from relax_gym.types import Batch, Completion, Group
from relax_gym.workers import WorkerCancelled


class Observer:
    """Notes how often a run starts and ends; raises where it is told to."""

    def __init__(self, *raises: str) -> None:
        self.seen: list[str] = []
        self.raises = raises

    def note(self, event: str) -> None:
        self.seen.append(event)
        if event in self.raises:
            raise ValueError(f"observer of {event}")

    @relax_gym.hookimpl
    def on_run_start(self) -> None:
        self.note("start")

    @relax_gym.hookimpl
    def on_batch(self) -> None:
        self.note("batch")

    @relax_gym.hookimpl
    def on_run_end(self) -> None:
        self.note("end")


@contextlib.contextmanager
def observing(observer: Observer) -> Iterator[Observer]:
    plugins().manager.register(observer)
    try:
        yield observer
    finally:
        plugins().manager.unregister(observer)


class BadTracker:
    closed = 0

    def log(self, step: int, metrics: Any) -> None: ...

    def close(self) -> None:
        self.closed += 1
        raise OSError("tracker cannot flush")


def kinds(run_dir: Path) -> dict[str, list[str]]:
    """Group ids of each kind of episode on disk."""
    found: dict[str, list[str]] = {}
    for line in read_lines(run_dir / "episodes.jsonl"):
        groups = found.setdefault(line["kind"], [])
        groups += [line["group_id"]] if line["group_id"] not in groups else []
    return found


def test_a_failed_start_leaves_the_folder_free(tmp_path: Path) -> None:
    size = {"steps": 1, "groups_per_step": 1, "group_size": 2}
    sections = {"run_dir": str(tmp_path / "run"), "env": [{"id": "test/OneOrTwo-v0"}], "train": size}
    config = parse_config({**sections, "model": {"name": str(tmp_path / "missing")}})
    for _ in range(2):
        with pytest.raises(ModelError, match="does not exist"):
            train(config)
    with pytest.raises(RunFolderError, match="leave out --resume to start one"):
        train(config, resume=True)
    run(trainer(tmp_path, half_a, train={"steps": 1}))


def test_a_sampler_that_cannot_start_is_closed_and_leaves_the_folder_free(tmp_path: Path) -> None:
    learner = RecordingLearner()
    loop = trainer(tmp_path, half_a, learner)

    async def start() -> None:
        raise SamplerError("no port")

    loop._parts.sampler.start = start
    with observing(Observer()) as observer, pytest.raises(SamplerError, match="no port"):
        run(loop)
    assert (loop._parts.sampler.closed, learner.closed, observer.seen) == (True, 1, [])
    assert not (tmp_path / "run" / "config.toml").exists()


@pytest.mark.parametrize(
    ("raises", "first", "seen"),
    [
        (("start",), "observer of start", ["start", "end"]),
        (("end",), "observer of end", ["start", "batch", "end"]),
        (("batch", "end"), "observer of batch", ["start", "batch", "end"]),
        ((), "tracker cannot flush", ["start", "batch", "end"]),
    ],
)
def test_everything_is_closed_once_and_the_first_failure_is_raised(
    tmp_path: Path, raises: tuple[str, ...], first: str, seen: list[str]
) -> None:
    learner, trackers = RecordingLearner(), [BadTracker(), BadTracker()]
    loop = trainer(tmp_path, half_a, learner, train={"steps": 1})
    loop._trackers = trackers
    with observing(Observer(*raises)) as observer, pytest.raises((ValueError, OSError, ExceptionGroup)) as caught:
        run(loop)
    errors = caught.value.exceptions if isinstance(caught.value, ExceptionGroup) else [caught.value]
    assert [str(error) for error in errors] == [first]
    assert observer.seen == seen
    assert [tracker.closed for tracker in trackers] == [1, 1]
    assert (learner.closed, loop._parts.sampler.closed) == (1, True)


def test_an_interrupted_checkpoint_is_finished_before_the_learner_is_closed(tmp_path: Path) -> None:
    order: list[str] = []
    saving, interrupted = threading.Event(), threading.Event()

    class Slow(RecordingLearner):
        def save_state(self, folder: Path) -> None:
            saving.set()
            interrupted.wait(10)
            super().save_state(folder)
            order.append("saved")

        def close(self) -> None:
            order.append("closed")

    loop = trainer(tmp_path, half_a, Slow(), train={"steps": 9}, checkpoint={"every": 1})

    async def main() -> None:
        running = asyncio.create_task(loop.run())
        await asyncio.to_thread(saving.wait, 10)
        running.cancel()
        for _ in range(50):
            await asyncio.sleep(0)
        interrupted.set()
        await running

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
    assert order == ["saved", "closed"]
    RecordingLearner().load(tmp_path / "run" / "checkpoints" / "step-000001")


def test_every_method_of_the_learner_is_called_on_its_thread(tmp_path: Path) -> None:
    called: dict[str, set[str]] = {}

    class Watched(RecordingLearner):
        def note(self, name: str) -> None:
            called.setdefault(name, set()).add(threading.current_thread().name)

        def step(self, batch: Batch) -> dict[str, float]:
            self.note("step")
            return super().step(batch)

        def imitate(self, batch: Batch, *, lr: float) -> dict[str, float]:
            self.note("imitate")
            return super().imitate(batch, lr=lr)

        def weights(self) -> Weights:
            self.note("weights")
            yield from ()

        def export(self, folder: Path) -> None:
            self.note("export")
            super().export(folder)

        def save_state(self, folder: Path) -> None:
            self.note("save_state")
            super().save_state(folder)

        def close(self) -> None:
            self.note("close")

    run(trainer(tmp_path, half_a, Watched(), warmup={"steps": 1, "episodes_per_step": 1}))
    names = ("step", "imitate", "weights", "export", "save_state", "close")
    assert called == {name: {"learner"} for name in names}


def test_a_learner_rests_before_a_sampler_that_shares_its_devices_has_their_memory_again(tmp_path: Path) -> None:
    done: list[str] = []

    class Resting(RecordingLearner):
        def step(self, batch: Batch) -> dict[str, float]:
            done.append("step")
            return super().step(batch)

        def rest(self) -> None:
            done.append("learner rests")

    class Sharing(ScriptedSampler):
        shares_devices = True

        async def start(self) -> None:
            done.append("start")
            await super().start()

        async def rest(self) -> None:
            done.append("sampler rests")

        async def update_weights(self, weights: Weights, version: int) -> None:
            done.append("update")
            await super().update_weights(weights, version)

    sampler = Sharing(half_a, tokenizer=TOKENIZER)
    run(trainer(tmp_path, None, Resting(), sampler=sampler, train={"steps": 2}))
    rests = ["learner rests", "start", "learner rests", "update"]
    assert done == [*rests, *["sampler rests", "step", "learner rests", "update"] * 2]


def test_weights_that_a_sampler_leaves_are_left_by_the_learner(tmp_path: Path) -> None:
    """One at a time: a large model's are never there all at once."""
    seen: list[str] = []

    class Lazy(RecordingLearner):
        def weights(self) -> Weights:
            try:
                for number in range(3):
                    seen.append(f"computed {number}")
                    yield f"{number}", torch.zeros(1)
            finally:
                seen.append(f"left in {threading.current_thread().name}")

        def close(self) -> None:
            seen.append("closed")

    loop = trainer(tmp_path, half_a, Lazy())

    async def update_weights(weights: Weights, version: int) -> None:
        seen.append("taken " + next(iter(weights))[0])
        raise SamplerError("no room")

    loop._parts.sampler.update_weights = update_weights
    with pytest.raises(SamplerError, match="no room"):
        run(loop)
    assert seen == ["computed 0", "taken 0", "left in learner", "closed"]


def test_groups_are_kept_when_the_learner_raises(tmp_path: Path) -> None:
    class Broken(RecordingLearner):
        def step(self, batch: Batch) -> dict[str, float]:
            while loop._queue.queued < 4:
                time.sleep(0.001)
            raise TrainingError("loss is nan")

    loop = trainer(tmp_path, half_a, Broken(), train={"max_staleness": 2})
    with pytest.raises(BaseExceptionGroup):
        run(loop)
    assert kinds(tmp_path / "run") == {"train": ["0", "1"], "queued": ["2", "3", "4", "5"]}
    steps = {line["group_id"]: line["step"] for line in read_lines(tmp_path / "run" / "episodes.jsonl")}
    assert steps == {"0": 1, "1": 1, "2": 2, "3": 2, "4": 3, "5": 3}


def cannot_say(group: Group) -> str | None:
    """A filter of the user's with a bug."""
    raise ZeroDivisionError("no episodes?")


def test_a_group_whose_filter_raises_is_kept(tmp_path: Path) -> None:
    algorithm = {"name": "grpo", "filter": "test_train_ends:cannot_say"}
    loop = trainer(tmp_path, half_a, train={"groups_per_step": 1, "group_size": 2}, algorithm=algorithm)
    with pytest.raises(BaseExceptionGroup) as caught:
        run(loop)
    assert caught.group_contains(ZeroDivisionError, match="no episodes")
    assert kinds(tmp_path / "run") == {"queued": ["0"]}
    lines = list(read_lines(tmp_path / "run" / "episodes.jsonl"))
    assert [(line["step"], line["episode_id"]) for line in lines] == [(1, "0-0"), (1, "0-1")]


class Mute(relax_gym.Env):
    """Nobody can answer: the prompt is too long."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return relax_gym.user("x" * 5000), {}

    def step(self, action: str) -> Any:
        raise AssertionError("nobody acts")


class Stuck(relax_gym.Env):
    """Only the episodes of the seed that came first end."""

    first: int | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        Stuck.first = seed if Stuck.first is None else Stuck.first
        self.mine = seed == Stuck.first
        return relax_gym.user("?"), {}

    async def step(self, action: str) -> Any:
        if not self.mine:
            await asyncio.Event().wait()
        return relax_gym.StepResult([], float(action == "a"), True, False, {})


if "test/Mute-v0" not in relax_gym.list():
    relax_gym.register("test/Mute-v0", Mute)
    relax_gym.register("test/Stuck-v0", Stuck)


def test_groups_are_kept_when_a_run_without_trainable_tokens_ends(tmp_path: Path) -> None:
    loop = trainer(tmp_path, half_a, env=[{"id": "test/Mute-v0"}], train={"max_empty_steps": 1})
    with pytest.raises(BaseExceptionGroup) as caught:
        run(loop)
    assert caught.group_contains(TrainingError, match="without one trainable token")
    assert kinds(tmp_path / "run") == {"train": ["0", "1"]}


def test_finished_groups_are_kept_on_an_interrupt(tmp_path: Path) -> None:
    loop = trainer(tmp_path, half_a, env=[{"id": "test/Stuck-v0"}])

    async def main() -> None:
        running = asyncio.create_task(loop.run())
        async with loop._queue._changed:
            await loop._queue._changed.wait_for(lambda: loop._queue.queued)
        running.cancel()
        await running

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
    assert kinds(tmp_path / "run") in ({"queued": ["0"]}, {"queued": ["1"]})  # whichever was reset first


def test_a_sampler_that_cancels_its_own_task_ends_the_run_instead_of_leaving_it_waiting(tmp_path: Path) -> None:
    class CancelsItself(ScriptedSampler):
        def open_session(self) -> Session:
            session = super().open_session()

            async def generate(*args: Any, **options: Any) -> Completion:
                own = asyncio.ensure_future(asyncio.sleep(60))
                own.cancel()
                await own
                raise AssertionError

            session.generate = generate  # type: ignore[method-assign]
            return session

    sampler = CancelsItself(half_a, tokenizer=TOKENIZER)
    with pytest.raises(BaseExceptionGroup) as caught:
        run(trainer(tmp_path, None, RecordingLearner(), sampler=sampler, supervision={"rollout": 20}))
    assert caught.group_contains(WorkerCancelled, match="it cancelled itself")
