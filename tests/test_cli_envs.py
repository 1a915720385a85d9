"""`relax-gym envs`, `rewards` and `plugins`."""

from __future__ import annotations

import ctypes
import os
import pty
import re
import signal
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path

import pytest
from command import run

# Envs, rewards, plugins ----------------------------------------------------------------------------------------------


def test_envs_list(capsys) -> None:
    code, out, _ = run(capsys, "envs", "list")
    row = next(line for line in out.splitlines() if line.startswith("relax_gym/GuessNumber-v0"))
    assert code == 0
    assert "Find a secret integer in [low, high] within `max_guesses` turns." in row
    assert row.split()[-1] == "relax-gym"


def test_envs_show(capsys) -> None:
    code, out, _ = run(capsys, "envs", "show", "relax_gym/GuessNumber-v0", "--kwargs", "style=terse")
    assert code == 0
    assert "Find a secret integer" in out
    assert ["max_guesses", "int", "4"] in [line.split() for line in out.splitlines()]
    assert "user: guess 1-10\nagent: 5\n" in out


def test_envs_show_of_an_env_that_needs_arguments(capsys) -> None:
    code, out, _ = run(capsys, "envs", "show", "relax_gym/Dataset-v0")
    assert code == 0
    assert "give arguments with --kwargs key=value" in out


def test_envs_play_takes_lines_from_a_pipe(capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", StringIO("0\n10\n"))
    code, out, _ = run(capsys, "envs", "play", "relax_gym/GuessNumber-v0", "--kwargs", "style=terse", "--seed", "1")
    assert code == 0
    assert out == (
        "user: guess 1-10\nagent: 0\n  reward 0\nuser: higher\nagent: 10\n  reward 0\nuser: lower\ntotal reward 0\n"
    )


@pytest.mark.parametrize("thread", ["main", "another"])
def test_ctrl_c_ends_play_without_waiting_for_a_line(thread: str) -> None:
    main, terminal = pty.openpty()
    command = [sys.executable, "-m", "relax_gym", "envs", "play", "relax_gym/GuessNumber-v0"]
    with subprocess.Popen(command, stdin=terminal, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as playing:
        assert playing.stdout is not None
        shown = b""
        while not shown.endswith(b"> "):
            shown += playing.stdout.read(1)
        time.sleep(0.3)  # now the line is waited for
        threads = sorted(int(task.name) for task in Path(f"/proc/{playing.pid}/task").iterdir())
        ctypes.CDLL(None).tgkill(playing.pid, threads[0 if thread == "main" else -1], signal.SIGINT)
        try:
            _, errors = playing.communicate(timeout=20)
        finally:
            playing.kill()
    os.close(main)
    os.close(terminal)
    assert (playing.returncode, errors.decode()) == (130, "")


def test_envs_play_reads_every_line_of_a_terminal() -> None:
    main, terminal = pty.openpty()
    os.write(main, b"0\n10\n\x04")
    command = [sys.executable, "-m", "relax_gym", "envs", "play", "relax_gym/GuessNumber-v0", "--kwargs", "style=terse"]
    played = subprocess.run([*command, "--seed", "1"], stdin=terminal, capture_output=True, text=True, timeout=60)
    os.close(main)
    os.close(terminal)
    assert (played.returncode, played.stderr) == (0, "")
    assert played.stdout.endswith("> agent: 10\n  reward 0\nuser: lower\n> total reward 0\n")


def test_envs_play_of_an_env_without_rows_says_so(capsys, tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").write_text("")
    given = ("--kwargs", f"path={tmp_path}/none.jsonl")
    code, _, err = run(capsys, "envs", "play", "relax_gym/Dataset-v0", *given)
    assert code == 1
    assert err.startswith(f"error: --kwargs = {{'path': '{tmp_path}/none.jsonl'}}: env 'relax_gym/Dataset-v0'")


def test_envs_play_by_the_expert(capsys) -> None:
    code, out, _ = run(capsys, "envs", "play", "relax_gym/GuessNumber-v0", "--expert")
    assert code == 0
    assert out.endswith("terminated\nuser: Correct!\ntotal reward 1\n")


BROKEN = """
from relax_gym import Env, StepResult, user


class BrokenStep(Env):
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return user("hello"), {}

    def step(self, action):
        return StepResult([{"role": "robot", "content": "x"}], 0.0, True, False, {})
"""


def test_envs_check(capsys, tmp_path: Path) -> None:
    code, out, _ = run(capsys, "envs", "check", "relax_gym/GuessNumber-v0", "--kwargs", "high=3")
    assert (code, "FAILED" in out) == (0, False)
    (tmp_path / "broken_step.py").write_text(BROKEN)
    code, out, _ = run(capsys, "envs", "check", f"{tmp_path / 'broken_step.py'}:BrokenStep")
    assert code == 1
    assert "FAILED" in out
    assert "robot" in out


def test_faulty_env_is_named_with_seed_and_turn(capsys, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "broken_play.py").write_text(BROKEN.replace("BrokenStep", "BrokenPlay"))
    monkeypatch.setattr("sys.stdin", StringIO("hi\n"))
    code, _, err = run(capsys, "envs", "play", f"{tmp_path / 'broken_play.py'}:BrokenPlay", "--seed", "6")
    assert code == 1
    assert "env 'local/BrokenPlay-v0', seed 6, turn 1: EnvError: message 0 has role 'robot'" in err


ASYNC = """
from relax_gym import Env, StepResult, user
import json

assert hasattr(json, "JSONDecodeError"), "the library's module, not this file"
closed = 0


class Async(Env):
    async def reset(self, *, seed=None, options=None):
        return user("hello"), {}

    async def step(self, action):
        return StepResult([], float(action == "right"), True, False, {})

    async def expert_action(self):
        return "right"

    async def close(self):
        global closed
        closed += 1
"""


def test_a_file_does_not_take_the_place_of_a_library_module(capsys, tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text(ASYNC)
    code, out, _ = run(capsys, "envs", "check", f"{tmp_path / 'json.py'}:Async")
    assert (code, "FAILED" in out) == (0, False)
    import json

    assert json.loads("[1]") == [1]
    assert not hasattr(json, "Async")


def test_async_envs_are_shown_played_and_closed(capsys, tmp_path: Path) -> None:
    (tmp_path / "async_env.py").write_text(ASYNC.replace("Async", "AsyncPlayed"))
    code, out, _ = run(capsys, "envs", "show", f"{tmp_path / 'async_env.py'}:AsyncPlayed")
    assert code == 0
    assert "an episode of the expert, seed 0:\nuser: hello\nagent: right\n  reward 1  terminated" in out
    code, out, _ = run(capsys, "envs", "play", "local/AsyncPlayed-v0", "--expert")
    assert (code, out) == (0, "user: hello\nagent: right\n  reward 1  terminated\ntotal reward 1\n")
    assert sys.modules["_relax_gym_file_async_env"].closed == 3


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["show", "relax_gym/GesNumber-v0"], "did you mean 'relax_gym/GuessNumber-v0'?"),
        (["play", "relax_gym/GuessNumber-v0", "--kwargs", "hihg=3"], "did you mean 'high'?"),
        (["check", "relax_gym/GuessNumber-v0", "--kwargs", "high"], "write --kwargs key=value"),
        (["check", "nowhere.py:Nothing"], "cannot import nowhere.py: FileNotFoundError"),
    ],
)
def test_envs_refuse_bad_input(capsys, arguments: list[str], expected: str) -> None:
    code, out, err = run(capsys, "envs", *arguments)
    assert code == 1
    assert expected in out + err


def test_plugins_list(capsys) -> None:
    code, out, _ = run(capsys, "plugins", "list")
    assert code == 0
    rows = [line.split() for line in out.splitlines()]
    assert ["relax_gym_rewards", "relax-gym", "register_rewards"] in rows
    assert ["algorithm", "grpo", "relax-gym"] in rows


def test_plugins_doctor(capsys) -> None:
    code, out, _ = run(capsys, "plugins", "doctor")
    assert code == 0
    assert "gymnasium" in [line.split()[0] for line in out.splitlines() if line]
    assert re.search(r"megatron +installed", out)
    assert "pip install 'relax-gym[sglang]'" in out or re.search(r"sglang +installed", out)
    assert "none broken" in out
