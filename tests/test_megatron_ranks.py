"""Ranks in processes: results, and every way for one to fail while the others wait for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from relax_gym.errors import ConfigError, TrainingError
from relax_gym_trainers.megatron_learner.ranks import Ranks

PLAIN, GLOO, UNMADE = "ranks_kit:Plain", "ranks_kit:Gloo", "ranks_kit:Unmade"


def pids(ranks: Ranks) -> list[int]:
    return [other._process.pid for other in ranks._others if other._process]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pid: int, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(pid)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    ranks = Ranks(3, PLAIN, ("a", 2), env=[{}, {"OF_RANK": "one"}, {}], logs=tmp_path_factory.mktemp("logs"))
    yield ranks
    ranks.close()


def told(ranks: Ranks, folder: Path) -> list[str]:
    """What each rank has seen, its arguments and its environment."""
    ranks.call("tell", str(folder))
    return [(folder / str(rank)).read_text() for rank in range(3)]


def test_every_rank_makes_the_object_and_is_called(plain, tmp_path):
    assert plain.call("get", "arguments") == ("a", 2)
    assert plain.call("get", "place").rank == 0
    plain.call("store", 1, "x")
    assert told(plain, tmp_path) == [f"((1, 'x'), ('a', 2), {env})" for env in (None, "'one'", None)]


def test_large_arrays_arrive_writable_and_are_each_ranks_own(plain, tmp_path):
    array = np.arange(1_000_000, dtype=np.float64)
    plain.call("add_one", array)
    expected = str(np.float64(500_000_500_000.0)), str(array.sum())
    assert expected[0] == expected[1]  # rank 0 took the array itself
    assert [text.split(",")[0].strip("(") for text in told(plain, tmp_path)] == [repr(np.float64(array.sum()))] * 3


def test_what_cannot_be_sent_ends_nothing(plain):
    with pytest.raises(Exception, match="pickle"):
        plain.call("store", lambda: None)
    assert plain.call("get", "arguments") == ("a", 2)


def test_a_call_may_go_on_while_its_caller_does_something_else(plain):
    first = plain.begin("get", "arguments")
    assert first() == ("a", 2)
    with pytest.raises(RuntimeError, match="the result of get was asked for already"):
        first()
    lost = plain.begin("get", "arguments")
    assert plain.call("get", "place").rank == 0
    with pytest.raises(RuntimeError, match="lost to a later call"):
        lost()


def test_a_call_whose_result_nobody_asks_for_is_waited_for():
    ranks = Ranks(2, PLAIN)
    ranks.begin("fail", 1, "raise")
    with pytest.raises(TrainingError, match="get cannot be called: the ranks have ended: in fail, rank 1 of 2 failed"):
        ranks.call("get", "place")
    ranks = Ranks(2, PLAIN)
    ranks.begin("store", 1)
    ranks.close()


def test_ranks_compute_together_and_close(tmp_path):
    ranks = Ranks(3, GLOO, logs=tmp_path / "learner")
    children = pids(ranks)
    assert ranks.call("total", 2.0) == 12.0
    ranks.close()
    ranks.close()
    assert not any(map(alive, children))
    assert not dist.is_initialized()
    with pytest.raises(TrainingError, match="total cannot be called: the ranks are closed"):
        ranks.call("total", 2.0)


def test_one_rank_needs_no_process():
    ranks = Ranks(1, GLOO)
    assert (ranks.call("total", 2.0), pids(ranks)) == (2.0, [])
    ranks.close()


ENDS = "all ranks have been ended. The run can go on from its last checkpoint: start it again with --resume"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "rank 1 of 2 failed: ValueError: no such luck"),
        pytest.param("exit", "rank 1 of 2 ended with exit code 3", marks=pytest.mark.slow),
        ("kill", "rank 1 of 2 was ended by SIGKILL (often the machine running out of memory)"),
    ],
)
def test_k110_a_rank_that_fails_while_rank_0_waits_for_it_in_a_collective_ends_the_call(tmp_path, how, message):
    ranks = Ranks(2, GLOO, logs=tmp_path)
    (child,) = pids(ranks)
    started = time.monotonic()
    with pytest.raises(TrainingError) as caught:
        ranks.call("fail", 1, how)
    assert time.monotonic() - started < 60
    assert str(caught.value) == f"in fail, {message}; {ENDS}"
    notes = "\n".join(caught.value.__notes__)
    assert ('raise ValueError("no such luck")' if how == "raise" else "now it goes wrong") in notes
    assert not alive(child)
    assert not dist.is_initialized()
    with pytest.raises(TrainingError, match="total cannot be called: the ranks have ended: in fail, rank 1 of 2"):
        ranks.call("total", 1.0)
    ranks.close()


def test_k110_a_rank_that_hangs_is_named_with_where_it_is(tmp_path):
    ranks = Ranks(2, GLOO, logs=tmp_path)
    started = time.monotonic()
    with pytest.raises(TrainingError, match=r"in fail, ranks 0, 1 of 2 did not come back within 0.5 s; all") as caught:
        ranks.call("fail", 1, "hang", timeout=0.5)
    assert time.monotonic() - started < 60
    here, there = caught.value.__notes__
    assert here.startswith("Rank 0 was here:\n")
    assert "in total" in here
    assert there.startswith("Rank 1 was here:\n")
    assert "ranks_kit.py" in there
    assert "in wait" in there


def test_a_rank_that_died_between_calls_is_named():
    ranks = Ranks(2, PLAIN)
    (child,) = pids(ranks)
    assert os.getsid(child) == child  # Ctrl-C in the terminal does not reach it
    os.kill(child, signal.SIGTERM)
    assert gone(child)
    with pytest.raises(TrainingError, match="in get, rank 1 of 2 was ended by SIGTERM; all"):
        ranks.call("get", "place")


def test_ctrl_c_ends_the_ranks():
    ranks = Ranks(2, PLAIN)
    (child,) = pids(ranks)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        ranks.call("wait_on", 1)
    assert not alive(child)


def test_rank_0_may_hang_for_ever(caplog, monkeypatch):
    monkeypatch.setattr("relax_gym_trainers.megatron_learner.ranks.GRACE_SECONDS", 0.2)
    ranks = Ranks(2, PLAIN)
    (child,) = pids(ranks)
    with pytest.raises(TrainingError, match=r"rank 0 of 2 did not come back within 0.3 s"):
        ranks.call("wait_on", 0, timeout=0.3)
    assert not alive(child)
    assert "rank 0 is still busy in its thread" in caplog.text


@pytest.mark.parametrize(
    ("rank", "how", "message"),
    [
        (2, "quit", "in fail, rank 2 of 3 failed: SystemExit: enough; "),
        (0, "raise", "in fail, rank 0 of 3 failed: ValueError: no such luck; "),
        (0, "refuse", "the loss is not finite"),
        (-1, "refuse", "the loss is not finite"),
    ],
)
def test_errors_name_the_rank_unless_they_are_for_the_user(rank, how, message):
    ranks = Ranks(3, PLAIN)
    with pytest.raises(TrainingError) as caught:
        ranks.call("fail", rank, how)
    assert str(caught.value).startswith(message)
    assert not getattr(caught.value, "__notes__", []) or how != "refuse"  # all say the same


@pytest.mark.parametrize(
    ("rank", "how", "error", "message"),
    [
        (1, "exit", TrainingError, "at the start, rank 1 of 2 ended with exit code 5; all ranks have been ended"),
        (1, "refuse", TrainingError, "at the start, rank 1 of 2 failed: learner.tp = 3 divides nothing; all"),
        (0, "refuse", ConfigError, "learner.tp = 3 divides nothing"),
    ],
)
def test_a_rank_that_cannot_start_is_named(rank, how, error, message):
    with pytest.raises(error) as caught:
        Ranks(2, UNMADE, (rank, how))
    assert str(caught.value).startswith(message)


ALONE = """
import os, sys, time
from relax_gym_trainers.megatron_learner.ranks import Ranks
ranks = Ranks(2, "ranks_kit:Plain")
if not os.fork():
    os.close(1)
    time.sleep(30)  # holds rank 0's side of the link open
print(ranks._others[0]._process.pid, flush=True)
ranks.call("wait_on", 1)
"""


@pytest.mark.slow
def test_no_rank_outlives_rank_0():
    with subprocess.Popen([sys.executable, "-c", ALONE], env=environment(), stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert alive(child)
        parent.kill()
    assert gone(child)


LAUNCHED = """
import sys
from relax_gym.errors import RelaxGymError
from relax_gym_trainers.megatron_learner.ranks import Ranks, launched_rank, serve
if launched_rank():
    serve()
    print("served", flush=True)
    sys.exit()
try:
    ranks = Ranks(int(sys.argv[1]), "ranks_kit:Gloo")
    print("total", ranks.call("total", 2.0), flush=True)
    if sys.argv[2:]:
        ranks.call("fail", 1, sys.argv[2])
    ranks.close()
except RelaxGymError as error:
    print(error, flush=True)
"""


def environment() -> dict[str, str]:
    here = str(Path(__file__).parent)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["2"], 0, ["total 6.0", "served"]),
        (["3"], 1, ["2 processes were started (WORLD_SIZE), but the learner's layout has 3 ranks"]),
        pytest.param(
            *(["2", "raise"], 1, ["total 6.0", "in fail, rank 1 of 2 failed: ValueError: no such luck; all"]),
            marks=pytest.mark.long,
        ),
        (["2", "kill"], 1, ["total 6.0", "Signal 9 (SIGKILL)", "rank      : 1 (local_rank: 1)"]),  # says torchrun
    ],
)
def test_torchrun_starts_the_ranks(tmp_path, arguments, code, expected):
    script = tmp_path / "script.py"
    script.write_text(LAUNCHED)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run([*command, *arguments], env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == code
    for text in expected:
        assert text in done.stdout + done.stderr
