"""`relax-gym init`: what it writes works as it is."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from distributions import add_distribution, run_with

from relax_gym.cli import main
from relax_gym.config import parse_config
from relax_gym.errors import ConfigError
from relax_gym.registry import load
from relax_gym.scaffold import class_name, init_env, init_plugin, init_reward
from relax_gym.testing import assert_env, check_reward
from relax_gym.types import Completion, FinishReason, StopReason, Task, Trajectory, Turn


def test_env_passes_its_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["init", "env", "letter_echo", "--dir", str(tmp_path)])
    path = tmp_path / "letter_echo.py"
    assert f"check it: relax-gym envs check {path}:LetterEcho\n" in capsys.readouterr().out
    assert len(path.read_text().splitlines()) < 40
    with pytest.raises(SystemExit) as end:
        main(["envs", "check", f"{path}:LetterEcho"])
    assert end.value.code in (0, None)
    assert "FAILED" not in capsys.readouterr().out


def test_expert_of_the_env_gets_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = init_env("expert_echo", tmp_path)
    with pytest.raises(SystemExit):
        main(["envs", "play", f"{path}:ExpertEcho", "--expert", "--kwargs", "rounds=2"])
    assert capsys.readouterr().out.endswith("  reward 0.5  terminated\ntotal reward 1\n")


def test_reward_passes_its_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    init_reward("few_words", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    reward = load("few_words:FewWords")(characters=4)
    episodes = [episode(), episode("ab", "abcd"), episode("abcdef"), episode("abcdefghij")]
    assert [reward(each) for each in episodes] == [None, 1.0, 0.5, 0.0]
    assert [result for result in check_reward(reward, episodes) if not result.passed] == []


def episode(*actions: str) -> Trajectory:
    said = Completion(token_ids=(5,), logprobs=(-1.0,), versions=(0,), finish_reason=FinishReason.STOP)
    turns = [Turn(observation=(), context_ids=(1,), completion=said, text=action, action=action) for action in actions]
    task = Task(env_id="me/Echo-v0", seed=0)
    return Trajectory(task=task, episode_id="0", turns=tuple(turns), stop_reason=StopReason.ENV_DONE)


def test_plugin_passes_its_own_tests(tmp_path: Path) -> None:
    files = init_plugin("my_words", tmp_path)
    root = tmp_path / "my-words"
    assert [str(path.relative_to(root)) for path in files] == [
        "pyproject.toml",
        "train.toml",
        "src/my_words/__init__.py",
        "src/my_words/env.py",
        "src/my_words/reward.py",
        "src/my_words/py.typed",
        "tests/test_my_words.py",
    ]
    add_distribution(tmp_path / "site", "my_words")
    done = run_with([tmp_path / "site", root / "src"], "pytest", "-q", root / "tests", cwd=root)
    assert done.returncode == 0, done.stdout
    assert "4 passed" in done.stdout


def test_plugin_metadata_names_its_entry_point(tmp_path: Path) -> None:
    pyproject = tomllib.loads(init_plugin("my_words", tmp_path)[0].read_text())
    assert pyproject["project"]["name"] == "my-words"
    assert pyproject["project"]["entry-points"]["relax_gym"] == {"my_words": "my_words"}
    assert pyproject["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["src/my_words"]


def test_plugin_config_is_accepted_once_it_is_installed(tmp_path: Path) -> None:
    text = init_plugin("my_words", tmp_path)[1].read_text()
    with pytest.raises(ConfigError, match="unknown env 'my_words/MyWordsEnv-v0'"):
        parse_config(tomllib.loads(text))
    add_distribution(tmp_path / "site", "my_words")
    paths = [tmp_path / "site", tmp_path / "my-words" / "src"]
    done = run_with(paths, "relax_gym", "train", tmp_path / "my-words" / "train.toml", "--set", "run_dir=/dev/null/x")
    assert done.stderr.startswith("error: cannot write run folder '/dev/null/x'")


@pytest.mark.slow
def test_plugin_is_built_installed_and_trained(tmp_path: Path) -> None:
    init_plugin("my_words", tmp_path)
    root, site = tmp_path / "my-words", tmp_path / "site"
    offline = ("--no-deps", "--no-build-isolation", "--offline")
    installed = run_with([], "uv", "pip", "install", *offline, "--target", site, root)
    assert installed.returncode == 0, installed.stderr
    command = ["relax_gym", "train", root / "train.toml", "--set", "train.steps=2", "--set", f"run_dir={tmp_path}/run"]
    done = run_with([site], *command, OMP_NUM_THREADS="1", RELAX_GYM_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    assert "step 2/2  reward " in done.stdout


@pytest.mark.parametrize("kind", [init_env, init_reward, init_plugin])
def test_nothing_is_overwritten(tmp_path: Path, kind: object) -> None:
    assert callable(kind)
    kind("some_name", tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match="exists already and is not overwritten"):
        kind("some_name", tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", ["CamelCase", "with-dash", "1st", "a b", "../up", "", "_x", "class", "a__b"])
def test_names_that_are_no_modules(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="is no module name; write it in snake_case"):
        init_plugin(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["json", "relax_gym", "pytest"])
def test_names_that_are_taken(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"name '{name}' is taken by an installed module"):
        init_env(name, tmp_path)


def test_folder_that_cannot_be_written() -> None:
    with pytest.raises(ConfigError, match=r"cannot write /dev/null/x/my_env\.py: Not a directory; choose"):
        init_env("my_env", Path("/dev/null/x"))


def test_class_names() -> None:
    assert [class_name(name) for name in ("echo", "count_down", "a2_b")] == ["Echo", "CountDown", "A2B"]


def test_written_env_takes_its_argument(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    init_env("argument_echo", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert_env(load("argument_echo:ArgumentEcho"), rounds=1)
