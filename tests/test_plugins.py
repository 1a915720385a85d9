"""Plugins of others: found, refused when they clash, survived when they are broken. And the example is a real one."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from distributions import add_distribution, run_with

from relax_gym import hookspecs
from relax_gym.algorithm import Algorithm
from relax_gym.config import Options
from relax_gym.errors import PluginError
from relax_gym.hookspecs import hookimpl
from relax_gym.plugins import KINDS, Plugins, plugins
from relax_gym.registry import Component, EnvSpec
from relax_gym.testing import assert_env
from relax_gym.types import Completion, FinishReason, StopReason, Task, Trajectory, Turn

ROOT = Path(__file__).parents[1]
HELLO = ROOT / "examples" / "hello_plugin"
HOOKS = [(name, hook) for name, hook in vars(hookspecs).items() if name.startswith(("register_", "on_"))]


def plugin(**hooks: Any) -> object:
    """A plugin object with these hooks."""
    return SimpleNamespace(**{name: hookimpl(function) for name, function in hooks.items()})


class Still(Algorithm):
    """Learns nothing."""

    def advantages(self, rewards: Any) -> Any:
        return np.zeros_like(rewards)

    def token_loss(self, tokens: Any) -> Any:
        return 0 * tokens.logprobs


# Hooks ---------------------------------------------------------------------------------------------------------------


def test_built_ins_come_in_by_the_same_door() -> None:
    assert set(plugins().sources) >= {"relax_gym_envs", "relax_gym_rewards", "relax_gym_trainers", "relax_gym_plugins"}
    assert plugins().envs.source("relax_gym/GuessNumber-v0") == "relax-gym"


@pytest.mark.parametrize(("name", "hook"), HOOKS)
def test_every_hook_is_documented(name: str, hook: Any) -> None:
    assert inspect.getdoc(hook)
    signature = str(inspect.signature(hook)).replace("'", "")
    document = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
    assert f"### `{name}{signature}`\n" in document
    section = document.partition(f"### `{name}{signature}`\n")[2].partition("\n### ")[0]
    assert f"    def {name}(" in section or f"\ndef {name}(" in section


class Nothing(Options):
    """No options."""


PART = Component(factory="math:sqrt", options=Nothing)


def test_every_registering_hook_is_collected() -> None:
    names = [name for name, _ in HOOKS if name.startswith("register_") and name != "register_commands"]
    given = dict.fromkeys(names, PART) | {"register_rewards": abs, "register_algorithms": Still}
    hooks = {name: (lambda name=name: {f"test_{name}": given[name]}) for name in names}
    hooks["register_envs"] = lambda: {
        "test/A-v0": "math:sqrt",
        "test/B-v0": EnvSpec(id="test/B-v0", entry_point="math:sqrt", kwargs={"x": 4}),
    }
    loaded = Plugins()
    loaded.add(plugin(**hooks), "test", "test-dist 1.0")
    assert loaded.broken == []
    assert loaded.envs.get("test/A-v0") == EnvSpec(id="test/A-v0", entry_point="math:sqrt")
    assert loaded.envs.get("test/B-v0").kwargs == {"x": 4}
    for name in names[1:]:
        table = loaded.tables[name.removeprefix("register_").removesuffix("s")]
        assert table.get(f"test_{name}") is given[name]
        assert table.source(f"test_{name}") == "test-dist 1.0"


@pytest.mark.parametrize(
    ("hook", "key", "value", "part", "error"),
    [
        ("register_envs", "Echo", "math:sqrt", "env 'Echo'", "env id 'Echo' is malformed; ids look like"),
        ("register_envs", "me/A-v0", 3, "env 'me/A-v0'", "env 'me/A-v0' is 3; it must be a class or 'module:Class'"),
        (
            "register_envs",
            "me/A-v0",
            EnvSpec(id="me/B-v0", entry_point="math:sqrt"),
            "env 'me/A-v0'",
            "the EnvSpec under 'me/A-v0' has id 'me/B-v0'; they must be equal",
        ),
        ("register_learners", "x", dict, "learner 'x'", "it is <class 'dict'>; it must be a relax_gym.Component"),
        ("register_samplers", "x", 1, "sampler 'x'", "it is 1; it must be a relax_gym.Component"),
        (
            "register_trackers",
            "x",
            print,
            "tracker 'x'",
            "it is <built-in function print>; it must be a relax_gym.Comp",
        ),
        ("register_algorithms", "x", PART, "algorithm 'x'", "it is Component("),
        ("register_rewards", "x", 0.5, "reward 'x'", "it is 0.5; it must be a class or function that returns a reward"),
        ("register_rewards", 7, abs, "reward 7", "the name 7 must be text"),
    ],
)
def test_a_value_of_the_wrong_type_is_left_out_and_named(
    hook: str, key: Any, value: Any, part: str, error: str
) -> None:
    loaded = Plugins()
    good = {"me/Good-v0": "math:sqrt"} if hook == "register_envs" else {}
    loaded.add(plugin(**{hook: lambda: {key: value, **good}}), "x", "x-dist 1")
    assert [(broken.source, broken.part) for broken in loaded.broken] == [("x-dist 1", part)]
    assert loaded.broken[0].error.startswith(error)
    assert key not in loaded.tables[KINDS[hook]].names()
    assert set(good) <= set(loaded.envs.names())


def test_a_string_that_leads_to_the_wrong_type_names_the_distribution() -> None:
    loaded = Plugins()
    loaded.add(plugin(register_learners=lambda: {"l": "math:sqrt"}), "x", "x-dist 1")
    loaded.add(plugin(register_trackers=lambda: {"t": Component(factory="math:sqrt", options="math:pi")}), "y", "y 1")
    with pytest.raises(
        PluginError, match=r"learner 'l' of x-dist 1: it is <built-in function sqrt>; it must be a rela"
    ):
        loaded.get("learner", "l")
    with pytest.raises(PluginError, match=r"options 'math:pi' is no subclass of relax_gym.config.Options"):
        loaded.get("tracker", "t").load_options()


def test_a_hook_with_arguments_it_cannot_have_leaves_its_plugin_out() -> None:
    loaded = Plugins()
    odd = plugin(register_rewards=lambda: {"odd": abs}, on_step_end=lambda stepp: None)
    loaded.add(odd, "x", "x 1")
    assert [(broken.what, broken.error.partition(":")[0]) for broken in loaded.broken] == [
        ("plugin 'x' of x 1", "PluginValidationError")
    ]
    assert loaded.manager.get_plugin("x") is None
    assert "x" not in loaded.sources
    assert "odd" not in loaded.tables["reward"].names()


def test_duplicate_name_names_both() -> None:
    loaded = Plugins()
    loaded.add(plugin(register_rewards=lambda: {"short": abs}), "one", "one-dist 1.0")
    with pytest.raises(PluginError, match=r"reward 'short' is registered twice: by one-dist 1\.0 and by two-dist 2\.0"):
        loaded.add(plugin(register_rewards=lambda: {"short": abs}), "two", "two-dist 2.0")


def test_built_in_names_cannot_be_taken() -> None:
    with pytest.raises(PluginError, match=r"env 'relax_gym/Wordle-v0' is registered twice: by relax-gym and by x 1"):
        Plugins().add(plugin(register_envs=lambda: {"relax_gym/Wordle-v0": "math:sqrt"}), "x", "x 1")


def test_misspelt_hook_names_the_nearest() -> None:
    with pytest.raises(PluginError, match=r"x 1 implements an unknown hook 'on_step_ends'; did you mean 'on_step_end'"):
        Plugins().add(plugin(on_step_ends=lambda: None), "x", "x 1")


def test_a_hook_that_raises_leaves_the_rest_of_its_plugin() -> None:
    loaded = Plugins()
    loaded.add(plugin(register_envs=lambda: 1 / 0, register_rewards=lambda: {"fine": abs}), "x", "x 1")
    assert [(broken.what, broken.error) for broken in loaded.broken] == [
        ("register_envs() of plugin 'x' of x 1", "ZeroDivisionError: division by zero")
    ]
    assert loaded.get("reward", "fine") is abs


def test_a_name_whose_module_is_missing_says_what_it_should_be() -> None:
    loaded = Plugins()
    loaded.add(plugin(register_rewards=lambda: {"gone": "no_such_module:Thing"}), "x", "x 1")
    with pytest.raises(
        PluginError, match=r"^reward 'gone' of x 1: cannot load 'no_such_module:Thing': ModuleNotFoundE"
    ):
        loaded.get("reward", "gone")


# Installed distributions ---------------------------------------------------------------------------------------------


HOOK = "from relax_gym import hookimpl\n@hookimpl\ndef "


@pytest.mark.parametrize(
    ("source", "part", "error"),
    [
        ("import no_such_module", "", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("def broken(:", "", "SyntaxError"),
        ("raise SystemExit('no licence')", "", "SystemExit: no licence"),
        ("from relax_gym import EnvSpec\nEnvSpec(id='Echo', entry_point='a:b')", "", "env id 'Echo' is malformed"),
        (f"{HOOK}register_envs():\n    return 1 / 0", "register_envs() of ", "ZeroDivisionError"),
        (f"{HOOK}register_envs():\n    return {{'Echo': 'a:b'}}", "env 'Echo' of ", "env id 'Echo' is malformed"),
        (f"{HOOK}register_commands(app):\n    app.fly()", "register_commands() of ", "AttributeError"),
    ],
)
def test_broken_plugin_is_named_and_survived(tmp_path: Path, source: str, part: str, error: str) -> None:
    add_distribution(tmp_path, "broken_one", source)
    done = run_with([tmp_path], "relax_gym", "envs", "list")
    assert done.returncode == 0
    assert "relax_gym/GuessNumber-v0" in done.stdout
    culprit = f"{part}plugin 'broken_one' of broken_one-dist 1.0"
    assert done.stderr.startswith(f"warning: {culprit} is left out: {error}")
    assert done.stderr.count("\n") == 1
    doctor = run_with([tmp_path], "relax_gym", "plugins", "doctor")
    assert doctor.returncode == 1
    assert f"broken: {culprit}\nTraceback" in doctor.stdout


@pytest.mark.parametrize(
    ("hook", "error"),
    [
        (
            "on_step_ends(step): pass",
            "bad_hook-dist 1.0 implements an unknown hook 'on_step_ends'; did you mean 'on_step_end'",
        ),
        (
            "register_rewards(): return {'env': abs}",
            "'env' is registered twice: by relax-gym and by bad_hook-dist 1.0",
        ),
    ],
)
def test_misspelt_hook_or_taken_name_stops_every_command_but_the_doctor(tmp_path: Path, hook: str, error: str) -> None:
    add_distribution(tmp_path, "bad_hook", f"from relax_gym import hookimpl\n@hookimpl\ndef {hook}\n")
    done = run_with([tmp_path], "relax_gym", "envs", "list")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ")
    assert error in done.stderr
    doctor = run_with([tmp_path], "relax_gym", "plugins", "doctor")
    assert doctor.returncode == 1
    assert error in doctor.stdout


def test_plugins_add_commands(tmp_path: Path) -> None:
    source = (
        "from relax_gym import hookimpl\n@hookimpl\ndef register_commands(app):\n"
        "    @app.command()\n    def greet(name: str):\n        print('hello', name)\n"
    )
    add_distribution(tmp_path, "greeter", source)
    assert run_with([tmp_path], "relax_gym", "greet", "you").stdout == "hello you\n"


# The example ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def hello(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(HELLO / "src")
    yield importlib.import_module
    for name in [name for name in sys.modules if name.partition(".")[0] == "hello_plugin"]:
        del sys.modules[name]


def test_hello_env_keeps_its_contract(hello: Any) -> None:
    assert_env(hello("hello_plugin.count_down").CountDown, highest=3)


def test_hello_env_pays_for_each_right_number(hello: Any) -> None:
    env = hello("hello_plugin.count_down").CountDown()
    env.reset(seed=1)  # starts at 2
    results = [env.step("1"), env.step("0")]
    assert [(r.reward, r.terminated, r.info["correct"]) for r in results] == [(0.5, False, False), (0.5, True, True)]
    env.reset(seed=1)
    assert env.step("7")[1:] == (0.0, True, False, {"correct": False})


def test_hello_reward(hello: Any) -> None:
    brief = hello("hello_plugin.brief").Brief(characters=2)
    said = Completion(token_ids=(5,), logprobs=(-1.0,), versions=(0,), finish_reason=FinishReason.STOP)

    def episode(*actions: str) -> Trajectory:
        turns = [
            Turn(observation=(), context_ids=(1,), completion=said, text=action, action=action) for action in actions
        ]
        task = Task(env_id="hello/CountDown-v0", seed=0)
        return Trajectory(task=task, episode_id="0", turns=tuple(turns), stop_reason=StopReason.ENV_DONE)

    assert brief(episode("12", "1")) == 1.0
    assert brief(episode("12", "123")) == 0.0
    assert brief(episode()) is None


def test_hello_algorithm(hello: Any) -> None:
    import torch

    from relax_gym.algorithm import TrainedTokens

    rank = hello("hello_plugin.rank").Rank(scale=2.0)
    assert rank.advantages(np.array([0.1, 5.0, 0.1])).tolist() == [-1.0, 2.0, -1.0]
    assert rank.advantages(np.array([1.0, np.nan, 3.0, 2.0])).tolist() == [-2.0, 0.0, 2.0, 0.0]
    assert rank.advantages(np.array([np.nan, np.nan])).tolist() == [0.0, 0.0]
    tokens = TrainedTokens(
        logprobs=torch.tensor([-1.0, -2.0]),
        old_logprobs=torch.tensor([-1.0, -3.0]),
        rollout_logprobs=torch.tensor([-1.0, -3.0]),
        advantages=torch.tensor([2.0, -1.0]),
        sample=torch.tensor([0, 1]),
        num_samples=2,
    )
    assert rank.token_loss(tokens).tolist() == pytest.approx([-2.0, 2.718281828])


def test_hello_algorithm_fits_in_50_lines() -> None:
    assert len((HELLO / "src" / "hello_plugin" / "rank.py").read_text().splitlines()) < 50


@pytest.mark.slow
def test_hello_plugin_is_installed_and_trained(tmp_path: Path) -> None:
    site = tmp_path / "site"
    offline = ("--no-deps", "--no-build-isolation", "--offline")
    installed = run_with([], "uv", "pip", "install", *offline, "--target", site, HELLO)
    assert installed.returncode == 0, installed.stderr
    run = tmp_path / "run"
    options = ["train.steps=3", "warmup.steps=10", "eval.episodes=8", f"run_dir={run}"]
    command = ["relax_gym", "train", HELLO / "train.toml", *(part for option in options for part in ("--set", option))]
    done = run_with([site], *command, OMP_NUM_THREADS="1", RELAX_GYM_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    assert "step 3/3" in done.stdout
    episodes = [json.loads(line) for line in (run / "episodes.jsonl").read_text().splitlines()]
    trained = [episode for episode in episodes if episode["kind"] == "train"]
    assert len(trained) == 3 * 8 * 8
    assert {episode["env_id"] for episode in trained} == {"hello/CountDown-v0"}
    assert {tuple(episode["rewards"]) for episode in trained} == {("env", "hello_brief")}
    assert 'name = "hello_rank"' in (run / "config.toml").read_text()
    listed = run_with([site], "relax_gym", "plugins", "list").stdout
    assert ["algorithm", "hello_rank", "hello-plugin", "0.1.0"] in [line.split() for line in listed.splitlines()]
