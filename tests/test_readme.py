"""Every code block of the README does what the README says."""

import json
import os
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from command import run
from fake_openai import FakeOpenAI
from readme_blocks import README, blocks

import relax_gym
from relax_gym.config import load_config, parse_config
from relax_gym.lines import read_lines
from relax_gym.testing import assert_env
from relax_gym.train import train
from relax_gym.types import Completion, FinishReason, StopReason, Task, Trajectory, Turn
from relax_gym_plugins.samplers.sglang.options import SGLangSamplerOptions
from relax_gym_plugins.samplers.sglang.process import ServerProcess, server_flags

pytest_plugins = ["sglang_fixtures"]

BLOCKS = blocks()
ROOT = README.parent
IN_A_CLONE = ("quickstart", "look", "tiny", "plugin", "commands")


def execute(name: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(BLOCKS[name][1], f"README block {name}", "exec"), names)
    return names


def test_every_block_is_named_and_run_by_a_test() -> None:
    assert README.read_text().count("```") == 2 * len(BLOCKS)
    sglang = {"sglang", "sglang-launch", "sglang-attach", "endpoint"}
    assert set(BLOCKS) == {*IN_A_CLONE, *sglang, "env", "media", "reward", "config", "tests"}


def test_the_environment_of_the_readme_keeps_the_contract() -> None:
    execute("env")
    env = relax_gym.make("readme/Reverse-v0")
    env.reset(seed=1)
    word = env.word
    assert env.step("nonsense").observation[0]["content"] == f"No. It starts with {word[-1]}."
    assert env.step(word[::-1]) == ([], 0.5, True, False, {"correct": True})
    assert_env("readme/Reverse-v0")
    assert BLOCKS["env"][1].strip().count("\n") < 25


def test_the_picture_env_of_the_readme_keeps_the_contract() -> None:
    execute("media")
    env = relax_gym.make("readme/Colour-v0")
    observation, _ = env.reset(seed=1)
    picture, text = observation[0]["content"]
    assert (picture["image"].shape, text["text"]) == ((64, 64, 3), "Which colour?")
    assert env.step(f"It is {env.colour}.") == ([], 1.0, True, False, {})
    assert_env("readme/Colour-v0")


def test_the_reward_of_the_readme_scores() -> None:
    said = Completion(token_ids=(1,), logprobs=(0.0,), versions=(0,), finish_reason=FinishReason.STOP)
    turns = tuple(
        Turn(observation=(), context_ids=(1,), completion=said, text=text, action=text) for text in ("a" * 160, "b")
    )
    trajectory = Trajectory(
        task=Task(env_id="a/B-v0", seed=0), episode_id="e", turns=turns, stop_reason=StopReason.ENV_DONE
    )
    reward = execute("reward")["Brevity"]()
    assert reward(trajectory) == 0.5


def test_the_config_of_the_readme_is_valid() -> None:
    config = parse_config(tomllib.loads(BLOCKS["config"][1]))
    assert config.train.max_staleness == 1


def test_the_command_of_the_readme_launches_the_sglang_that_it_installs() -> None:
    install, train_it = BLOCKS["sglang"][1].strip().splitlines()
    program, verb, example, *options = shlex.split(train_it)
    assert (program, verb, set(options[::2])) == ("relax-gym", "train", {"--set"})
    sampler = load_config(ROOT / example, options[1::2]).sampler
    python = SGLangSamplerOptions(**sampler.options).python
    folder, pip = shlex.split(install)[3], shlex.split(install)[5]
    assert (sampler.name, python, pip) == ("sglang", f"{folder}/bin/python", f"{folder}/bin/pip")


def test_the_samplers_of_the_readme_are_valid() -> None:
    example = tomllib.loads((ROOT / "examples/quickstart.toml").read_text())
    for block in ("sglang-launch", "sglang-attach"):
        config = parse_config(example | tomllib.loads(BLOCKS[block][1]))
        server_flags(SGLangSamplerOptions(**config.sampler.options).server_args)  # raises


@pytest.mark.sglang
def test_a_run_with_the_attached_servers_of_the_readme(
    lent_server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attach = tomllib.loads(BLOCKS["sglang-attach"][1])["sampler"]
    monkeypatch.setenv(attach["api_key_env"], lent_server.headers["Authorization"].removeprefix("Bearer "))
    example = tomllib.loads((ROOT / "examples/tiny_guess.toml").read_text())
    short = {"steps": 2, "groups_per_step": 2, "group_size": 2}
    changes = {"run_dir": str(tmp_path / "run"), "warmup": None, "eval": {"every": 0}, "train": short}
    result = train(parse_config(example | changes | {"sampler": attach | {"urls": [lent_server.url]}}))
    played = read_lines(tmp_path / "run/episodes.jsonl")
    versions = {version for record in played for turn in record["turns"] for version in turn["versions"]}
    assert (result.steps, versions) == (2, {0, 1})


def test_the_endpoint_of_the_readme(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    program, *arguments = shlex.split(BLOCKS["endpoint"][1])
    with FakeOpenAI(lambda body: {"content": "Answer: 1"}).in_thread() as server:
        arguments[arguments.index("--endpoint") + 1] = server.url
        code, _, err = run(capsys, *arguments, "--episodes", 2, "--out", tmp_path / "out")
    assert (program, code) == ("relax-gym", 0), err
    assert [body["model"] for body in server.bodies][:1] == arguments[-1:]
    assert json.loads((tmp_path / "out/results.json").read_text())["results"]["episodes"] == 2


def test_continuous_integration_runs_the_test_command_of_the_readme() -> None:
    assert "readme_blocks.py tests" in (ROOT / ".ci" / "run").read_text()
    assert BLOCKS["tests"][1].strip().endswith("&& pytest -n 2")


@pytest.mark.slow
def test_the_commands_of_the_readme_in_a_fresh_clone(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    output: dict[str, str] = {}
    for name in IN_A_CLONE:
        script = BLOCKS[name][1] if name == "quickstart" else f". .venv/bin/activate\n{BLOCKS[name][1]}"
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script], cwd=clone, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{name}: {done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        output[name] = done.stdout
    for example, metric, gain in (("quickstart", "eval/accuracy", 0.5), ("tiny_guess", "eval/reward", 0.3)):
        folder = clone / "runs" / example
        held_out = [line[metric] for line in read_lines(folder / "metrics.jsonl") if metric in line]
        assert held_out[-1] - held_out[0] >= gain
        assert (folder / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert "calc(" in output["look"]
    assert "hello/CountDown-v0" in output["plugin"]
    shutil.rmtree(clone)
