"""Bad values are found before the model is: each names its key, what was given and what is wrong."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from faulty_envs import Faulty, closes

import relax_gym
from relax_gym.build import build_parts
from relax_gym.chat import ChatRenderer
from relax_gym.config import ChatConfig, RunConfig, parse_config
from relax_gym.env_driver import EnvDriver
from relax_gym.errors import ConfigError, TemplateError
from relax_gym.plugins import plugins
from relax_gym.preflight import check_tools, probe_envs
from relax_gym.registry import list_envs
from relax_gym.testing import tiny_tokenizer
from relax_gym.tools import ToolEnv
from relax_gym.workers import WorkerThreads

NO_TOOLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


class Search(ToolEnv):
    """Has one tool."""

    def look(self, word: str) -> str:
        """Look a word up."""
        return word


class Later(relax_gym.Env):
    """Knows its tools after `reset` only."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    @property
    def tools(self) -> Any:  # type: ignore[override]
        return self.state["tools"]

    def reset(self, **kwargs: Any) -> Any:  # type: ignore[override]
        tool = {"type": "function", "function": {"name": "late", "description": "", "parameters": {}}}
        self.state = {"tools": [tool]}
        return relax_gym.user("?"), {}


class Short:
    """Refuses as the template of `relax-gym init plugin` teaches."""

    def __init__(self, characters: int = 8) -> None:
        if characters < 1:
            raise ValueError(f"characters is {characters}; it must be at least 1")

    def __call__(self, trajectory: relax_gym.Trajectory) -> float:
        return 1.0


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    for name, env in (
        ("test/PreflightFaulty-v0", Faulty),
        ("test/PreflightSearch-v0", Search),
        ("test/PreflightLater-v0", Later),
    ):
        if name not in list_envs():
            relax_gym.register(name, env)
    if "preflight_short" not in plugins().tables["reward"].names():
        plugins().tables["reward"].add("preflight_short", Short, "test")


def config(env: dict[str, Any], **sections: Any) -> RunConfig:
    return parse_config(
        {
            "model": {"name": "no/such/model"},  # refused when it is looked for, so nothing here gets that far
            "env": [{"id": "relax_gym/GuessNumber-v0"}, env],
            "train": {"steps": 1, "groups_per_step": 1, "group_size": 2},
            **sections,
        }
    )


@pytest.mark.parametrize(
    ("env", "sections", "expected"),
    [
        (
            {"id": "relax_gym/GuessNumber-v0", "kwargs": {"high": -5}},
            {},
            "env.1.kwargs = {'high': -5}: env 'relax_gym/GuessNumber-v0' cannot be built: high",
        ),
        (
            {"id": "relax_gym/GuessNumber-v0", "kwargs": {"low": 3}, "eval_kwargs": {"high": 2}},
            {},
            "env.1.eval_kwargs = {'low': 3, 'high': 2}: env 'relax_gym/GuessNumber-v0' cannot be built: low",
        ),
        (
            {"id": "test/PreflightFaulty-v0", "kwargs": {"fault": "constructor"}},
            {},
            "env.1.kwargs = {'fault': 'constructor'}: env 'test/PreflightFaulty-v0' cannot be built: "
            "ValueError: no licence",
        ),
        (
            {"id": "test/PreflightFaulty-v0"},
            {"warmup": {"steps": 1}},
            "[warmup] needs Faulty.expert_action(), and random_action() if expert_probability < 1",
        ),
        (
            {"id": "relax_gym/GuessNumber-v0"},
            {"reward": [{"name": "env"}, {"name": "preflight_short", "kwargs": {"characters": 0}}]},
            "reward.1.kwargs = {'characters': 0}: reward 'preflight_short' cannot be built: "
            "ValueError: characters is 0; it must be at least 1",
        ),
        (
            {"id": "relax_gym/Dataset-v0", "kwargs": {"path": "no/such.jsonl"}},
            {},
            "env.1.kwargs = {'path': 'no/such.jsonl'}: env 'relax_gym/Dataset-v0' cannot",
        ),
    ],
)
def test_bad_values_are_refused_before_the_model_is_looked_for(
    env: dict[str, Any], sections: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        build_parts(config(env, **sections))
    assert expected in str(caught.value)


def test_misspelt_eval_kwargs_are_refused_when_the_config_is_read() -> None:
    with pytest.raises(ConfigError, match=r"takes no argument 'hihg'; did you mean 'high'\?"):
        config({"id": "relax_gym/GuessNumber-v0", "eval_kwargs": {"hihg": 3}})


def test_a_constructor_that_hangs_is_cut_off() -> None:
    import time

    relax_gym.register("test/PreflightHang-v0", lambda: time.sleep(5))
    hanging = config({"id": "test/PreflightHang-v0"}, rollout={"step_timeout": 0.1})
    with pytest.raises(ConfigError, match=r"constructor took longer than rollout.step_timeout = 0.1 s"):
        probe_envs(hanging)


def test_probed_envs_are_closed() -> None:
    closes.clear()
    probe_envs(config({"id": "test/PreflightFaulty-v0", "kwargs": {"name": "a"}, "eval_kwargs": {"name": "b"}}))
    assert closes == {"a": 1, "b": 1}


def test_tools_that_the_chat_template_cannot_show_are_refused_at_the_start() -> None:
    probes = probe_envs(config({"id": "test/PreflightSearch-v0"}))
    assert [[tool["function"]["name"] for tool in probe.tools] for probe in probes] == [[], ["look"]]
    check_tools(probes, ChatRenderer(tiny_tokenizer()))
    check_tools(probes, ChatRenderer(tiny_tokenizer(chat_template=NO_TOOLS), ChatConfig(tool_role="user")))
    with pytest.raises(TemplateError, match=r"^env.1.kwargs: env 'test/PreflightSearch-v0': "):
        check_tools(probes, ChatRenderer(tiny_tokenizer(chat_template=NO_TOOLS)))


def test_tools_that_an_env_has_after_reset_only_are_no_fault_before() -> None:
    probes = probe_envs(config({"id": "test/PreflightLater-v0"}))
    assert [list(probe.tools) for probe in probes] == [[], []]
    check_tools(probes, ChatRenderer(tiny_tokenizer(chat_template=NO_TOOLS)))

    async def after_reset() -> list[str]:
        threads = WorkerThreads("env")
        driver = EnvDriver(relax_gym.Task(env_id="test/PreflightLater-v0", seed=0), threads, 5.0)
        await driver.reset()
        names = [tool["function"]["name"] for tool in driver.tools()]
        await driver.close()
        threads.close()
        return names

    assert asyncio.run(after_reset()) == ["late"]


def test_build_parts_checks_the_tools(tmp_path: Path) -> None:
    template = tmp_path / "plain.jinja"
    template.write_text(NO_TOOLS)
    searching = config(
        {"id": "test/PreflightSearch-v0"}, model={"name": "tiny-qwen3"}, chat={"template": str(template)}
    )
    with pytest.raises(TemplateError, match=r"^env.1.kwargs: env 'test/PreflightSearch-v0': "):
        build_parts(searching)
