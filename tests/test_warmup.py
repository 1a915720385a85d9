"""Demonstrations: whatever an expert does, warm-up goes on with the others, reports it and counts it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import faulty_envs  # noqa: F401 (registers its envs)
import pytest
from chat_fixtures import play, renderer_of, tool
from train_cases import half_a, run, trainer

import relax_gym
from relax_gym import Env, StepResult, user
from relax_gym.actor import Actor
from relax_gym.chat import ChatRenderer
from relax_gym.config import RolloutConfig
from relax_gym.dry_run import _rehearse
from relax_gym.errors import ConfigError, TrainingError
from relax_gym.evaluate import evaluate
from relax_gym.hookspecs import hookimpl
from relax_gym.play import Player
from relax_gym.plugins import plugins
from relax_gym.preflight import probe_envs
from relax_gym.sampler import SamplingParams
from relax_gym.testing import RecordingLearner, ScriptedSampler, tiny_tokenizer
from relax_gym.types import Metrics

TOKENIZER = tiny_tokenizer()


class Sometimes(Env):
    """Its expert fails on odd seeds, if it is told how."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.odd = bool((seed or 0) % 2)
        return user("a or b?"), {}

    def step(self, action: str) -> Any:
        return StepResult([], float(action == "a"), True, False, {"correct": action == "a"})

    def expert_action(self) -> Any:
        if self.fault == "always" or (self.fault == "raises" and self.odd):
            raise ValueError("no idea")
        return 3 if self.fault == "number" and self.odd else "a"


class SometimesAsync(Sometimes):
    """The same, async."""

    async def expert_action(self) -> Any:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().expert_action()


if "test/Sometimes-v0" not in relax_gym.list():
    relax_gym.register("test/Sometimes-v0", Sometimes)
    relax_gym.register("test/SometimesAsync-v0", SometimesAsync)


def warm_up(tmp_path: Path, env: str, **kwargs: Any) -> tuple[RecordingLearner, list[Metrics]]:
    seen: list[Metrics] = []

    class Observer:
        @hookimpl
        def on_warmup_step(self, metrics: Metrics) -> None:
            seen.append(metrics)

    learner = RecordingLearner()
    loop = trainer(
        tmp_path,
        half_a,
        learner,
        env=[{"id": f"test/{env}-v0", "kwargs": kwargs}],
        train={"steps": 1},
        warmup={"steps": 2, "episodes_per_step": 6},
    )
    plugins().manager.register(observer := Observer())
    try:
        run(loop)
    finally:
        plugins().manager.unregister(observer)
    return learner, seen


@pytest.mark.parametrize("env", ["Sometimes", "SometimesAsync"])
@pytest.mark.parametrize(
    ("fault", "message"),
    [("raises", "ValueError: no idea"), ("number", "EnvError: expert_action returned 3; it must return text")],
)
def test_failing_experts_are_left_out_counted_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, env: str, fault: str, message: str
) -> None:
    learner, metrics = warm_up(tmp_path, env, fault=fault)
    played = [len(batch.samples) for batch in learner.imitated]
    errors = [int(step["episode/errors"]) for step in metrics]
    assert [good + bad for good, bad in zip(played, errors, strict=True)] == [6, 6]
    assert sum(errors) > 0
    logged = [record.getMessage() for record in caplog.records if f"env test/{env}-v0, seed " in record.getMessage()]
    assert len(logged) == sum(errors)
    assert all(f", turn 0: {message}\n" in line and "Error" in line for line in logged)


def test_good_experts_have_no_errors_async_ones_neither(tmp_path: Path) -> None:
    learner, metrics = warm_up(tmp_path, "SometimesAsync")
    assert [step["episode/errors"] for step in metrics] == [0, 0]
    sample = learner.imitated[0].samples[0]
    assert TOKENIZER.decode(sample.token_ids[sample.loss_mask == 1].tolist()) == "a<|im_end|>"


def test_experts_that_always_fail_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="every expert episode failed"):
        warm_up(tmp_path, "Sometimes", fault="always")


def test_no_steps_are_no_warm_up_and_need_no_expert(tmp_path: Path) -> None:
    config = trainer(tmp_path, half_a, env=[{"id": "test/Nan-v0"}], warmup={"steps": 1})._config
    with pytest.raises(ConfigError, match=r"\[warmup\] needs Nan\.expert_action\(\).*, or set warmup\.steps = 0"):
        probe_envs(config)
    none = {"env": [{"id": "test/Nan-v0"}], "warmup": {"steps": 0}, "train": {"steps": 1}}
    loop = trainer(tmp_path, lambda *_: "b", learner := RecordingLearner(), **none)
    probe_envs(loop._config)
    run(loop)
    assert (learner.imitated, learner.version) == ([], 1)


@pytest.mark.parametrize(("fault", "error"), [("", None), ("always", "ValueError: no idea")])
def test_dry_run_asks_async_experts_and_survives_failing_ones(tmp_path: Path, fault: str, error: str | None) -> None:
    loop = trainer(tmp_path, half_a, env=[{"id": "test/SometimesAsync-v0", "kwargs": {"fault": fault}}])
    task = loop._parts.tasks.task(0)
    (seen,) = asyncio.run(_rehearse(loop._config, [task], ChatRenderer(TOKENIZER), loop._parts.rewards, 1000))
    assert seen.actor == "expert"
    assert (seen.trajectory.error and seen.trajectory.error.message) == error
    assert [turn.action for turn in seen.trajectory.turns] == ([] if error else ["a"])


def test_k92_faults_in_an_evaluation_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    env = {"id": "test/Faulty-v0", "kwargs": {"fault": "step"}}
    loop = trainer(tmp_path, half_a, env=[env], eval={"episodes": 3})

    async def main() -> float:
        sampler = ScriptedSampler("a", tokenizer=TOKENIZER)
        player = Player(sampler=sampler, renderer=ChatRenderer(TOKENIZER), rewards=[], config=RolloutConfig())
        return (await evaluate(player, loop._parts.tasks, greedy=True)).metrics["eval/errors"]

    assert asyncio.run(main()) == 3
    seeds = [task.seed for task in loop._parts.tasks.eval_tasks()]
    logged = sorted(record.getMessage().partition("\n")[0] for record in caplog.records)
    assert logged == sorted(f"env test/Faulty-v0, seed {seed}, turn 1: KeyError: 'lost item'" for seed in seeds)
    assert all("Traceback" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("said", ["seven", "Hm.\n</think>\n\nseven"])
def test_an_expert_is_heard_where_the_prompt_opens_thinking(said: str) -> None:
    async def act() -> str:
        return said

    renderer = renderer_of("deepseek_r1")
    conversation, _ = play(renderer, [user("How many?")])
    for opened in (True, False):  # This template opens no thinking after a tool result.
        assert conversation.opened_thinking == opened
        ids = asyncio.run(
            Actor(act, renderer).generate(conversation.token_ids, SamplingParams(max_new_tokens=9))
        ).token_ids
        text = renderer.decode(ids)
        assert text.count("</think>") == (opened or said != "seven")
        assert renderer.action(text, opened=opened) == "seven"
        conversation.complete(ids)
        conversation.observe([tool("sun")])
