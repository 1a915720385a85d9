"""What a run waits for: said in status.json, limited by [supervision], and ended by signals."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from train_cases import TOKENIZER, half_a, run, trainer

import relax_gym
from relax_gym.doctor import diagnose
from relax_gym.errors import Stopped, StuckError, TrainingError
from relax_gym.lines import read_lines
from relax_gym.run_folder import list_checkpoints
from relax_gym.sampler import Session, Weights
from relax_gym.scoring import WeightedReward
from relax_gym.supervision import BLOCKED_EXIT_CODE
from relax_gym.testing import RecordingLearner, ScriptedSampler
from relax_gym.types import Batch, TrainingSample, Trajectory
from relax_gym.workers import WorkerThreads


class Silent(relax_gym.Env):
    """Never answers."""

    asked = asyncio.Event()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return relax_gym.user("?"), {}

    async def step(self, action: str) -> Any:
        self.asked.set()
        await asyncio.Event().wait()


if "test/Silent-v0" not in relax_gym.list():
    relax_gym.register("test/Silent-v0", Silent)


class Hanging(RecordingLearner):
    """Does not come back from the method that is named."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.method, self.released = method, threading.Event()

    def hang(self, method: str) -> None:
        if method == self.method:
            self.released.wait(60)

    def step(self, batch: Batch) -> dict[str, float]:
        self.hang("step")
        return super().step(batch)

    def weights(self) -> Weights:
        self.hang("weights")
        return iter(())

    def export(self, folder: Path) -> None:
        self.hang("export")
        super().export(folder)

    def close(self) -> None:
        self.hang("close")


def status(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "status.json").read_text())
    return found


@pytest.mark.parametrize(
    ("method", "limit", "named"),
    [
        ("step", "learner", "the learner's step 1 took longer than supervision.learner = 0.2 s"),
        ("weights", "publish", "the publication of version 0 took longer than supervision.publish = 0.2 s"),
        ("export", "checkpoint", "a checkpoint took longer than supervision.checkpoint = 0.2 s"),
    ],
)
def test_k110_a_learner_that_hangs_is_named_and_ends_the_run(
    tmp_path: Path, method: str, limit: str, named: str
) -> None:
    learner = Hanging(method)
    try:
        loop = trainer(tmp_path, half_a, learner, train={"steps": 1}, supervision={limit: 0.2, "close": 0.2})
        if method == "weights":
            loop._parts.sampler.update_weights = lambda weights, version: asyncio.to_thread(list, weights)
        with pytest.raises((StuckError, BaseExceptionGroup)) as caught:
            run(loop)
    finally:
        learner.released.set()
    errors = caught.value.exceptions if isinstance(caught.value, BaseExceptionGroup) else [caught.value]
    assert named in str(errors[0])
    assert loop._parts.sampler.closed
    assert (status(tmp_path / "run")["state"], named in status(tmp_path / "run")["error"]) == ("failed", True)
    assert named in (diagnose(tmp_path / "run").last_error or "")


def test_k110_a_part_that_cannot_be_closed_is_left_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    learner = Hanging("close")
    loop = trainer(tmp_path, half_a, learner, train={"steps": 1}, supervision={"close": 0.2})
    assert run(loop).steps == 1
    learner.released.set()
    assert "the learner, to be closed took longer than supervision.close = 0.2 s" in caplog.text
    assert status(tmp_path / "run")["state"] == "finished"


def test_k110_an_env_that_hangs_longer_than_a_step_may_wait_is_named(tmp_path: Path) -> None:
    loop = trainer(tmp_path, half_a, env=[{"id": "test/Silent-v0"}], supervision={"rollout": 0.3})
    with pytest.raises(BaseExceptionGroup) as caught:
        run(loop)
    assert caught.group_contains(
        StuckError, match=r"groups of step 1 took longer .* it waits for step\(\) \(env test/Silent-v0, seed \d+\)"
    )


def test_k110_an_evaluation_that_hangs_names_its_env(tmp_path: Path) -> None:
    sections = {"supervision": {"rollout": 0.3}, "eval": {"episodes": 1}}
    with pytest.raises(StuckError, match=r"an evaluation took longer .* step\(\) \(env test/Silent-v0"):
        run(trainer(tmp_path, half_a, env=[{"id": "test/Silent-v0"}], **sections))


class Retries(relax_gym.Env):
    """Tries again whatever happens, even when it is cancelled."""

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return relax_gym.user("a or b?"), {}

    async def step(self, action: str) -> Any:
        while True:
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue


if "test/Retries-v0" not in relax_gym.list():
    relax_gym.register("test/Retries-v0", Retries)


def test_k110_an_env_that_ignores_its_cancellation_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where an oversampled group is aborted, and when the loop is closed."""
    monkeypatch.setattr("relax_gym.workers.LEAVING", 0.1)
    envs = [{"id": "test/OneOrTwo-v0"}, {"id": "test/Retries-v0"}]
    sections: dict[str, Any] = {"env": envs, "rollout": {"step_timeout": 0.2}}
    run(trainer(tmp_path, half_a, train={"steps": 3, "order": "ready", "oversample": 2}, **sections))
    lines = read_lines(tmp_path / "run" / "episodes.jsonl")
    failed = [line for line in lines if line["env_id"] == "test/Retries-v0" and line["kind"] == "train"]
    assert all("step took longer than rollout.step_timeout = 0.2 s" in line["error"]["message"] for line in failed)
    assert {line["step"] for line in lines} == {1, 2, 3}


async def ignores(*args: Any) -> Any:
    """Tries again whatever happens, even when it is cancelled."""
    while True:
        try:
            await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            continue


async def stuck_in_a_thread(*args: Any) -> None:
    """As on a disk that does not answer."""
    await asyncio.to_thread(threading.Event().wait)


@pytest.mark.parametrize("update", [ignores, stuck_in_a_thread])
def test_k106_a_sampler_that_takes_no_weights_and_ignores_its_cancellation_is_left(
    update: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relax_gym.workers.LEAVING", 0.1)
    loop = trainer(tmp_path, half_a, supervision={"publish": 0.2})
    loop._parts.sampler.update_weights = update
    with pytest.raises(StuckError, match="publication of version 0"):
        run(loop)


class Deaf(ScriptedSampler):
    """Its requests ignore that they are cancelled."""

    def open_session(self) -> Session:
        session = super().open_session()
        session.generate = ignores  # type: ignore[method-assign]
        return session


@pytest.mark.parametrize("limits", [{"rollout": {"episode_timeout": 0.1}}, {"supervision": {"rollout": 0.1}}])
def test_k106_requests_that_ignore_their_cancellation_are_left(
    limits: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relax_gym.workers.LEAVING", 0.1)
    sampler = Deaf(half_a, tokenizer=TOKENIZER)
    loop = trainer(tmp_path, None, sampler=sampler, train={"steps": 1, "max_empty_steps": 1}, **limits)
    with pytest.raises(BaseExceptionGroup) as caught:
        run(loop)
    ended = TrainingError if "rollout" in limits else StuckError
    assert caught.group_contains(ended, match=r"without one trainable token|groups of step 1 took longer")


def test_k106_a_reward_that_ignores_its_cancellation_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax_gym.workers.LEAVING", 0.1)
    loop = trainer(tmp_path, half_a, train={"steps": 1, "max_replacements": 0}, rollout={"reward_timeout": 0.1})
    loop._player._rewards = [WeightedReward(name="judge", weight=1.0, reward=ignores)]
    assert run(loop).steps == 1
    lines = read_lines(tmp_path / "run" / "episodes.jsonl")
    assert {line["reward_failures"]["judge"] for line in lines} == {"took longer than 0.1 s (rollout.reward_timeout)"}


class Slow(relax_gym.Env):
    """A step takes a while."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return relax_gym.user("a or b?"), {}

    def step(self, action: str) -> Any:
        time.sleep(0.1)
        return relax_gym.StepResult([], float(action == "a"), True, False, {})


if "test/Slow-v0" not in relax_gym.list():
    relax_gym.register("test/Slow-v0", Slow)


def slow(trajectory: Trajectory) -> float:
    time.sleep(0.1)
    return 1.0


@pytest.mark.parametrize("what", ["env", "reward"])
def test_to_wait_for_a_thread_is_not_to_hang(what: str, tmp_path: Path) -> None:
    """Calls above the number of threads wait their turn, and their limit is none on that."""
    env = {"id": "test/Slow-v0" if what == "env" else "test/OneOrTwo-v0"}
    limits = {"step_timeout": 0.5, "reward_timeout": 0.5}
    loop = trainer(tmp_path, half_a, env=[env], train={"steps": 1, "group_size": 6}, rollout=limits)
    if what == "env":
        loop._player._threads = WorkerThreads("env", limit=1)
    else:
        loop._player._rewards = [WeightedReward(name="slow", weight=1.0, reward=slow)]
        loop._player._reward_threads = WorkerThreads("reward", limit=1)
    limits_seen: set[float | None] = set()

    async def main() -> None:
        running = asyncio.create_task(loop.run())
        while not running.done():
            waits = loop._supervisor.waits.longest_first()
            assert not [str(wait) for wait in waits if wait.seconds and time.monotonic() - wait.since > wait.seconds]
            limits_seen.update(wait.seconds for wait in waits if wait.what in ("step()", "reward slow"))
            await asyncio.wait({running}, timeout=0.02)
        await running

    asyncio.run(main())
    assert limits_seen == {None, 0.5}


# Signals -------------------------------------------------------------------------------------------------------------


class Asking(RecordingLearner):
    """Has the process signalled during the step that is named."""

    def __init__(self, at: int, number: int) -> None:
        super().__init__()
        self.at, self.number = at, number

    def step(self, batch: Batch) -> dict[str, float]:
        if self.version + 1 == self.at:
            os.kill(os.getpid(), self.number)
        return super().step(batch)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(("every", "saved"), [(1, 2), (2, 2), (3, 3)])
def test_a_signal_ends_the_run_after_a_checkpoint(
    tmp_path: Path, number: signal.Signals, every: int, saved: int
) -> None:
    before = signal.getsignal(number)
    loop = trainer(tmp_path, half_a, Asking(2, number), train={"steps": 6, "update_every": every})
    with pytest.raises(BaseExceptionGroup) as caught:
        run(loop)
    assert caught.group_contains(Stopped, match=f"stopped by {number.name} after step {saved}, which is saved")
    assert [step for step, _ in list_checkpoints(tmp_path / "run")] == [saved]
    assert [line["step"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")] == list(range(1, saved + 1))
    assert signal.getsignal(number) == before
    assert diagnose(tmp_path / "run").state == "stopped"


def test_a_signal_does_not_wait_for_rollouts(tmp_path: Path) -> None:
    loop = trainer(tmp_path, half_a, env=[{"id": "test/Silent-v0"}])

    async def main() -> None:
        Silent.asked = asyncio.Event()
        running = asyncio.ensure_future(loop.run())
        await Silent.asked.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        await running

    with pytest.raises(BaseExceptionGroup) as caught:
        asyncio.run(main())
    assert caught.group_contains(Stopped, match="before its first step was trained")
    assert list_checkpoints(tmp_path / "run") == []


def test_a_signal_waits_for_what_is_prepared_as_long_as_that_may_take(tmp_path: Path) -> None:
    class Prepares(RecordingLearner):
        done = False

        def prepare(self, samples: Sequence[TrainingSample]) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1.0)
            self.done = True

    learner = Prepares()
    env = [{"id": "test/OneOrTwo-v0"}, {"id": "test/Silent-v0", "weight": 0.2}]
    limits = {"checkpoint": 0.5, "rollout": 30}
    with pytest.raises(BaseExceptionGroup) as caught:
        run(trainer(tmp_path, half_a, learner, env=env, train={"groups_per_step": 8}, supervision=limits))
    assert caught.group_contains(Stopped, match="before its first step was trained")
    assert learner.done


CHILD = """
import os, signal, sys, threading, time
from pathlib import Path
from train_cases import TOKENIZER, half_a, run, trainer
from relax_gym.testing import RecordingLearner, ScriptedSampler

class Ends(RecordingLearner):
    def step(self, batch):
        if sys.argv[2] == "twice":
            os.kill(os.getpid(), signal.SIGTERM)
            while signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait()

class Blocks:
    def log(self, step, metrics):
        time.sleep(3600)
    def close(self): ...

blocks = sys.argv[2] == "block"
loop = trainer(Path(sys.argv[1]), half_a, None if blocks else Ends(), supervision={"loop": 0.5})
loop._trackers = [Blocks()] if blocks else []
run(loop)
"""


@pytest.mark.slow
def test_a_second_signal_ends_the_process_at_once_and_k109_a_blocked_loop_with_its_stack(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    codes = {}
    for how in ("twice", "block"):
        command = [sys.executable, "-c", CHILD, str(tmp_path / how), how]
        (tmp_path / how).mkdir()
        codes[how] = subprocess.run(command, env=environment, capture_output=True, timeout=60, check=False).returncode
    assert codes == {"twice": -signal.SIGTERM, "block": BLOCKED_EXIT_CODE}
    assert "in log" in (tmp_path / "block" / "run" / "run.log").read_text()
    assert "event loop was blocked" in status(tmp_path / "block" / "run")["error"]
    assert diagnose(tmp_path / "twice" / "run").state == "killed"
