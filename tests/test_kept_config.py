"""What a run folder keeps of a config, and with which changes a run goes on."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr, model_validator

from relax_gym.config import Options, RunConfig, dump_config, load_config, parse_config
from relax_gym.errors import RunFolderError
from relax_gym.kept_config import config_to_keep
from relax_gym.plugins import plugins
from relax_gym.redaction import MASK
from relax_gym.registry import Component
from relax_gym.run_folder import RunFolder

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.toml"))
CONFIG: dict[str, Any] = {
    "model": {"name": "tiny-qwen3"},
    "env": [{"id": "relax_gym/GuessNumber-v0", "kwargs": {"high": 9}}],
    "train": {"steps": 2, "groups_per_step": 2, "group_size": 2},
}
SGLANG = {"name": "sglang", "engines": 2, "devices": ["0", "1"], "server_args": {"mem_fraction_static": 0.9}}


def parse(folder: Path, **sections: Any) -> RunConfig:
    return parse_config({"run_dir": str(folder), **CONFIG, **sections})


def resume(folder: Path, **sections: Any) -> None:
    RunFolder(parse(folder, **sections), resume=True).begin(0)


class StubbornOptions(Options):
    """Not read again as they are."""

    token: SecretStr = SecretStr("none")
    size: int = 3
    header: str = ""
    old: str = ""

    @model_validator(mode="before")
    @classmethod
    def _check(cls, given: Any) -> Any:
        if "old" in given:
            raise ValueError("old is not given any more")
        return {**given, "header": f"Bearer {given['token']}"} if "token" in given else given


class TalkativeOptions(StubbornOptions):
    """Would be read again, with the secret in another option."""

    @model_validator(mode="before")
    @classmethod
    def _check(cls, given: Any) -> Any:
        return {**given, "header": f"Bearer {given['token']}"} if "token" in given else given


@pytest.fixture(autouse=True)
def plugins_for_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("sampler", "tracker"):
        for options in (StubbornOptions, TalkativeOptions):
            component = Component(factory="math:sqrt", options=options)
            monkeypatch.setitem(plugins().tables[kind]._values, options.__name__, component)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_default_of_plugins_is_kept_and_read_again(path: Path) -> None:
    config = load_config(path)
    kept = config_to_keep(config)
    assert {"lr", "micro_batch_tokens", "epochs"} <= kept["learner"].keys()
    assert {"aggregation", "old_logprobs"} <= kept["algorithm"].keys()
    assert "max_slots" in kept["sampler"] or "engines" in kept["sampler"]
    assert "flush_seconds" in kept["trackers"][0]
    again = parse_config(tomllib.loads(dump_config(config)))
    assert config_to_keep(again) == kept
    assert "lr" in again.learner.options


def test_defaults_of_nested_options_of_teachers_and_of_algorithms_of_an_env_are_kept(tmp_path: Path) -> None:
    own = {"name": "opd", "teacher": "a", "level": "reward", "teacher_engine": "local"}
    env = [{**CONFIG["env"][0], "algorithm": own}]
    kept = config_to_keep(parse(tmp_path, env=env, learner={"name": "megatron", "lora": {"rank": 2}}))
    assert kept["learner"]["lora"].keys() > {"rank", "alpha"}
    assert (kept["learner"]["tp"], kept["learner"]["lora"]["rank"]) == (1, 2)
    assert kept["env"][0]["algorithm"]["clip_low"] == 0.2
    assert kept["env"][0]["algorithm"]["teacher_engine"].keys() > {"name", "dtype"}


@pytest.mark.parametrize("name", ["StubbornOptions", "TalkativeOptions"])
def test_a_plugin_that_would_not_read_its_defaults_again_or_betray_a_secret_keeps_what_it_was_given(
    tmp_path: Path, name: str
) -> None:
    config = parse(tmp_path, trackers=[{"name": name, "token": "s3cret", "size": 4}])
    assert config_to_keep(config)["trackers"] == [{"name": name, "token": MASK, "size": 4}]


def test_a_run_goes_on_from_a_folder_without_defaults_and_with_defaults_written_out(tmp_path: Path) -> None:
    RunFolder(parse(tmp_path), resume=False).begin(0)
    (tmp_path / "config.toml").write_text(
        'model.name = "tiny-qwen3"\ntrain = {steps = 2, groups_per_step = 2, group_size = 2}\n'
        '[[env]]\nid = "relax_gym/GuessNumber-v0"\nkwargs.high = 9\n[learner]\nname = "torch"\nlr = 1e-6\n'
    )
    with pytest.raises(RunFolderError, match=r"another run \(learner\.lr: 1e-06 there, 0\.1 here\)"):
        resume(tmp_path, learner={"lr": 0.1})
    resume(tmp_path, learner={"lr": "1e-6", "epochs": 1}, algorithm={"name": "grpo", "clip_low": 0.2})
    assert tomllib.loads((tmp_path / "config.toml").read_text())["learner"]["lr"] == 1e-6
    resume(tmp_path, learner={"lr": 1e-6})


def test_a_resumed_run_may_have_other_servers_and_time_limits(tmp_path: Path) -> None:
    RunFolder(parse(tmp_path, sampler=SGLANG), resume=False).begin(0)
    other: dict[str, Any] = {"devices": ["2"], "engines": 1, "server_args": {"tp_size": 2}, "python": "/sglang/python"}
    limits = {"step_timeout": 9.0, "episode_timeout": 99.0, "reward_timeout": 8.0}
    resume(tmp_path, sampler={**SGLANG, **other, "request_timeout": 7.0}, rollout=limits)
    resume(tmp_path, sampler={"name": "sglang", "urls": ["http://10.0.0.5:30000"]}, rollout=limits)
    kept = tomllib.loads((tmp_path / "config.toml").read_text())
    assert (kept["sampler"]["urls"], kept["rollout"]["step_timeout"]) == (["http://10.0.0.5:30000"], 9.0)
    with pytest.raises(RunFolderError) as caught:
        resume(tmp_path, sampler={**SGLANG, "on_update": "keep"}, rollout={"top_p": 0.5, "stop": ["x"]}, seed=3)
    assert str(caught.value) == (
        f"{str(tmp_path)!r} holds another run (seed: 0 there, 3 here; rollout.top_p: 1.0 there, 0.5 here; rollout.stop"
        ": [] there, ['x'] here; sampler.on_update: 'abort' there, 'keep' here); resume it with its own config"
    )


def test_a_resumed_run_may_have_another_layout_of_the_local_sampler_but_no_other_sampler(tmp_path: Path) -> None:
    RunFolder(parse(tmp_path, sampler={"max_slots": 64}), resume=False).begin(0)
    resume(tmp_path, sampler={"max_slots": 8, "device": "cpu", "deterministic": False})
    with pytest.raises(RunFolderError, match=r"\(sampler\.max_context: not set there, 64 here\)"):
        resume(tmp_path, sampler={"max_context": 64})
    with pytest.raises(RunFolderError, match=r"\(sampler\.name: 'local' there, 'sglang' here\)"):
        resume(tmp_path, sampler=SGLANG)


def test_servers_of_teachers_may_change(tmp_path: Path) -> None:
    def opd(teacher: str, engine: dict[str, Any]) -> dict[str, Any]:
        return {"name": "opd", "teacher": teacher, "level": "reward", "teacher_engine": {"name": "sglang", **engine}}

    RunFolder(parse(tmp_path, algorithm=opd("a", {"urls": {"a": ["http://a:1"]}})), resume=False).begin(0)
    resume(tmp_path, algorithm=opd("a", {"urls": {"a": ["http://b:2"]}}))
    with pytest.raises(RunFolderError, match=r"another run \(algorithm\.teacher: 'a' there, 'b' here\)"):
        resume(tmp_path, algorithm=opd("b", {"engines": 2}))


@pytest.mark.parametrize("name", ["StubbornOptions", "TalkativeOptions"])
def test_another_secret_is_no_other_run(tmp_path: Path, name: str) -> None:
    RunFolder(parse(tmp_path, sampler={"name": name, "token": "s3cret"}), resume=False).begin(0)
    resume(tmp_path, sampler={"name": name, "token": "other"})
    with pytest.raises(RunFolderError, match=r"another run \(sampler\.size: ") as caught:
        resume(tmp_path, sampler={"name": name, "token": "other", "size": 4})
    assert "other" not in str(caught.value).replace("another", "")
