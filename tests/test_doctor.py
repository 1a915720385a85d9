"""What `relax-gym doctor RUN` says of runs in any state."""

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from train_cases import half_a, run, trainer

from relax_gym.cli import main
from relax_gym.doctor import Diagnosis, diagnose, render
from relax_gym.endpoint.client import EndpointConfig
from relax_gym.endpoint.evaluate import EndpointEval
from relax_gym.endpoint.folder import EvalFolder
from relax_gym.errors import RunFolderError
from relax_gym.run_log import log_file
from relax_gym.testing import RecordingLearner
from relax_gym.types import Batch


class Stays(RecordingLearner):
    """Never comes back from its second step."""

    def step(self, batch: Batch) -> dict[str, float]:
        if self.version == 1:
            threading.Event().wait()
        return super().step(batch)


def ask(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    with pytest.raises(SystemExit) as caught:
        main(["doctor", str(run_dir), "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return int(caught.value.code or 0), found


def until(run_dir: Path, wanted: Callable[[Diagnosis], bool]) -> Diagnosis:
    """The first diagnosis that is as wanted."""
    for _ in range(1500):
        try:
            found = diagnose(run_dir)
        except RunFolderError:  # it has not begun
            found = None
        if found and wanted(found):
            return found
        time.sleep(0.02)
    raise AssertionError(f"not within 30 s: {found}")


def test_a_live_run_a_hanging_one_and_a_killed_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    pid = os.fork()
    if pid == 0:
        try:
            run(trainer(tmp_path, half_a, Stays(), checkpoint={"every": 1}))
        finally:
            os._exit(1)
    try:
        waits = "the learner's step 2"
        found = until(run_dir, lambda found: found.step == 1 and waits in [wait["what"] for wait in found.waits])
        assert (found.state, found.pid, found.step, found.steps, found.saved_step) == ("healthy", pid, 1, 3, 1)
        assert found.queue is not None and found.queue["consumed"] == 4
        assert "waits for the learner's step 2 (the loop): " in render(found)
        assert ask(run_dir, capsys)[0] == 0
        monkeypatch.setattr("relax_gym.doctor.SILENT", 0.3)
        os.kill(pid, signal.SIGSTOP)
        found = until(run_dir, lambda found: found.state == "hangs")
        assert f"process {pid} exists, but is silent" in found.summary
        assert f"py-spy dump --pid {pid}" in found.advice
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    zombie = diagnose(run_dir).state
    os.waitpid(pid, 0)
    code, said = ask(run_dir, capsys)
    assert (code, said["state"], said["saved_step"], zombie) == (1, "killed", 1, "killed")
    assert f"process {pid} on {said['host']} is gone" in said["summary"]
    assert "--resume" in said["advice"]
    status = json.loads((run_dir / "status.json").read_text())
    for changed, state in (
        ({"host": "elsewhere"}, "killed"),
        ({"pid": os.getpid(), "pid_started": "0", "written": time.time()}, "killed"),  # the id is another's by now
        ({"host": "elsewhere", "written": time.time() + 60}, "healthy"),
        ({"host": "elsewhere", "written": time.time() + 60, "loop_blocked": 9.0}, "hangs"),
    ):
        (run_dir / "status.json").write_text(json.dumps(status | changed))
        assert diagnose(run_dir).state == state


def test_a_finished_run_and_one_that_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "good").mkdir()
    run(trainer(tmp_path / "good", half_a))
    code, said = ask(tmp_path / "good" / "run", capsys)
    assert (code, said["state"], said["step"], said["waits"]) == (0, "finished", 3, [])
    shutil.rmtree(tmp_path / "good" / "run" / "checkpoints")
    (tmp_path / "good" / "run" / "status.json").unlink()
    assert diagnose(tmp_path / "good" / "run").state == "unknown"

    class Broken(RecordingLearner):
        def step(self, batch: Batch) -> dict[str, float]:
            raise ZeroDivisionError("no tokens")

    (tmp_path / "bad").mkdir()
    with pytest.raises(BaseExceptionGroup):
        run(trainer(tmp_path / "bad", half_a, Broken()))
    code, said = ask(tmp_path / "bad" / "run", capsys)
    assert (code, said["state"], said["last_error"]) == (1, "failed", "ZeroDivisionError: no tokens")


def test_a_broken_folder_is_explained_and_one_without_a_run_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(trainer(tmp_path, half_a))
    run_dir = tmp_path / "run"
    (run_dir / "metrics.jsonl").write_text('{"step": 1}\n{"step\n{"step": 3}\n')
    (run_dir / "status.json").write_text("{")
    (run_dir / "config.toml").write_text("train = 1\n")
    (run_dir / "checkpoints" / "step-000009").mkdir()
    found = diagnose(run_dir)
    assert found.state == "broken"
    places = ("metrics.jsonl", "checkpoints/step-000009", "status.json", "config.toml")
    assert all(any(fault.startswith(place) for fault in found.faults) for place in places)
    assert "broken: checkpoints/step-000009 is empty" in render(found)
    assert ask(run_dir, capsys)[0] == 1
    (tmp_path / "nothing").mkdir()
    with pytest.raises(RunFolderError, match="holds no run; give the folder that run_dir names"):
        diagnose(tmp_path / "nothing")


def test_without_a_run_it_checks_the_plugins(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor"])
    assert "none broken" in capsys.readouterr().out


def test_a_run_that_says_that_it_has_finished_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its checkpoints may have been removed since."""
    run(trainer(tmp_path, half_a))
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    code, found = ask(tmp_path / "run", capsys)
    assert (code, found["state"]) == (0, "finished")


def test_a_note_in_the_log_is_no_error(tmp_path: Path) -> None:
    run(trainer(tmp_path, half_a))
    log = tmp_path / "run" / "run.log"
    with log_file(log):
        run(trainer(tmp_path, half_a, resume=True, train={"steps": 4}))
    assert "INFO train.steps was 3 and is 4: " in log.read_text()
    assert diagnose(tmp_path / "run").last_error is None


@pytest.mark.parametrize("results", [True, False])
def test_the_folder_of_an_evaluation(results: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    endpoint = EndpointConfig(url="http://localhost:1/v1", model="m")
    settings = EndpointEval(env="test/OneOrTwo-v0", endpoint=endpoint, out=tmp_path).settings()
    folder = EvalFolder(tmp_path, settings, resume=False)
    if results:
        folder.write_results({})
    code, found = ask(tmp_path, capsys)
    assert (code, found["state"], found["faults"]) == (0, "finished" if results else "unknown", [])
    resume = f"relax-gym eval test/OneOrTwo-v0 --endpoint http://localhost:1/v1 --model m --out {tmp_path} … --resume"
    assert (resume in found["advice"]) is not results
    (tmp_path / "episodes.jsonl").write_text('{"slot\n{"slot": 3}\n')
    code, found = ask(tmp_path, capsys)
    assert (code, found["state"], len(found["faults"])) == (1, "broken", 1)
