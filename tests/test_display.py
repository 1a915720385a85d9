"""What a run shows, event by event."""

from __future__ import annotations

import tomllib
from io import StringIO
from pathlib import Path
from typing import cast

import pytest
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from relax_gym.config import RunConfig, parse_config
from relax_gym.context import RunContext
from relax_gym.display import Display, Progress, duration, evaluation_text, faults, sparkline, step_text
from relax_gym.plugins import plugins
from relax_gym.types import StopReason, Task, Trajectory

CONFIG = """
run_dir = "runs/x"
[model]
name = "tiny-qwen3"
[[env]]
id = "relax_gym/GuessNumber-v0"
[warmup]
steps = 30
[train]
steps = 12
groups_per_step = 2
group_size = 4
"""
STEP = {
    "reward/mean": 0.241,
    "learner/loss": 0.01234,
    "learner/grad_norm": 1.5,
    "perf/tokens_per_second": 310.4,
    "staleness/mean": 0.25,
    "staleness/max": 1.0,
    "queue/in_flight": 2,
    "queue/queued": 1,
    "episode/errors": 0,
    "time/step": 8.0,
    "time/learner_bubble": 2.5,
    "time/sampler_bubble": 0.5,
    "time/publish": 0.25,
    "perf/sampled_tokens_per_second": 420.0,
    "learner/logprob_diff_mean": 0.0123,
    "learner/ratio_mean": 1.001,
    "staleness/tokens_lag_0": 30.0,
    "staleness/tokens_lag_1": 10.0,
    **{f"time/episode_{part}": seconds for part, seconds in (("p50", 1.0), ("p95", 4.5), ("max", 9.0))},
    **{f"time/episode_{part}/a/B-v0": seconds for part, seconds in (("p50", 2.0), ("p95", 5.5), ("max", 9.0))},
}
EPISODE = Trajectory(
    task=Task(env_id="relax_gym/GuessNumber-v0", seed=0), episode_id="0", turns=(), stop_reason=StopReason.ENV_DONE
)


class Clock:
    """Goes on when it is told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def context(start_step: int = 0) -> RunContext:
    return RunContext(
        config=config(),
        run_dir=Path("runs/x"),
        model_path=Path("models/m"),
        tokenizer=cast(PreTrainedTokenizerBase, None),
        start_step=start_step,
    )


def config() -> RunConfig:
    return parse_config(tomllib.loads(CONFIG))


def console(*, terminal: bool) -> Console:
    return Console(file=StringIO(), force_terminal=terminal, width=100, soft_wrap=True, color_system=None)


def printed(console: Console) -> str:
    file = console.file
    assert isinstance(file, StringIO)
    return file.getvalue()


def test_plain_lines_of_a_run() -> None:
    out = console(terminal=False)
    clock = Clock()
    with Display(config(), out, clock):
        hook = plugins().hook
        hook.on_run_start(context=context())
        for step in range(1, 31):
            clock.now += 10.0
            hook.on_warmup_step(step=step, metrics={"loss": 2.0 - step / 30})
        clock.now += 10.0
        hook.on_evaluation(step=0, metrics={"eval/reward": 0.37, "eval/accuracy": 0.4})
        clock.now += 8.0
        hook.on_step_end(step=1, metrics=STEP)
        clock.now += 12.0  # the step and an evaluation
        hook.on_evaluation(step=2, metrics={"eval/reward": 0.5, "eval/errors": 2})
        hook.on_step_end(
            step=2, metrics={**STEP, "episode/errors": 3, "queue/dropped_zero_variance": 2, "time/step": 4.0}
        )
        hook.on_checkpoint(step=2, folder=Path("runs/x/checkpoints/step-000002"))
        hook.on_run_end(context=context())
    assert printed(out).splitlines() == [
        "run runs/x  model models/m",
        *(f"warm-up {step:>2}/30  loss {2.0 - step / 30:.4f}" for step in range(3, 31, 3)),
        "eval after step 0  reward 0.370  accuracy 0.400",
        "step  1/12  reward 0.241  loss 0.0123  tokens/s 310  lag 1  waited 2.5  8.0s  eta 88s",
        "eval after step 2  reward 0.500  errors 2",
        "step  2/12  reward 0.241  loss 0.0123  tokens/s 310  lag 1  waited 2.5  errors 3  dropped_zero_variance 2  "
        "4.0s  eta 100s",
        "checkpoint runs/x/checkpoints/step-000002",
        "run folder: runs/x",
        "look at episodes: relax-gym view runs/x",
    ]
    assert plugins().manager.get_plugin("relax_gym.display") is None


def test_live_panel_on_a_terminal() -> None:
    out = console(terminal=True)
    clock = Clock()
    with Display(config(), out, clock):
        hook = plugins().hook
        hook.on_run_start(context=context())
        hook.on_step_end(step=1, metrics=STEP)
        clock.now += 16.0
        hook.on_step_end(step=2, metrics={**STEP, "reward/mean": 0.5, "episode/errors": 3})
        hook.on_evaluation(step=2, metrics={"eval/reward": 0.7, "eval/errors": 1})
        hook.on_episode_end(step=3, trajectory=EPISODE, evaluation=False)
        hook.on_episode_end(step=3, trajectory=EPISODE, evaluation=True)
        hook.on_run_end(context=context())
    text = printed(out)
    for expected in (
        "2/12   eta 80s",
        "1 of 8 for the next step",
        "0.500   ▁█",
        "reward 0.700  errors 1",
        "0.0123   gradient norm 1.5",
        "310 trained tokens/s   8.0 s a step",
        "mean 0.25   max 1",
        "learner 2.5 s   sampler 0.5 s of a step",
        "2 in flight   1 waiting",
        "420 tokens/s",
        "0.25 s",
        "|Δ log-prob| 0.0123   ratio 1.001",
        "0: 75%   1: 25%",
        "p50 1.0 s   p95 4.5 s   longest 9.0 s",
        "episodes of a/B-v0",
        "errors 3, evaluation errors 1",
        "look at episodes: relax-gym view runs/x",
    ):
        assert expected in text


def test_live_panel_shows_the_warm_up_until_it_is_over() -> None:
    out = console(terminal=True)
    with Display(config(), out) as display:
        display.on_warmup_step(step=6, metrics={"loss": 1.25})
        assert ("warm-up", "6/30   loss 1.2500") in display.facts()
        display.on_step_end(step=1, metrics=STEP)
        assert [name for name, _ in display.facts() if name == "warm-up"] == []


def test_a_failed_run_leaves_the_terminal_and_the_plugins_alone() -> None:
    out = console(terminal=True)
    with pytest.raises(ValueError, match="boom"), Display(config(), out) as display:
        display.on_run_start(context=context())
        raise ValueError("boom")
    assert plugins().manager.get_plugin("relax_gym.display") is None
    assert printed(out).endswith("\x1b[?25h")  # the cursor is back


def test_eta_counts_only_the_steps_of_this_session() -> None:
    clock = Clock()
    progress = Progress(total=10, first=6, clock=clock)
    assert progress.eta is None
    clock.now += 2.0
    progress.advance(7)
    clock.now += 4.0
    progress.advance(8)
    assert progress.eta == 6.0


def test_every_kind_of_fault_is_counted() -> None:
    metrics = {
        "episode/count": 8.0,
        "episode/errors": 1,
        "episode/unscored": 0,
        "episode/empty_completions": 2,
        "episode/new_segments": 3,
        "stop/prompt_too_long": 0.5,
        "stop/timeout": 0.125,
        "stop/env_done": 0.25,
        "queue/dropped_zero_variance": 4,
        "queue/dropped_unscored": 0,
    }
    assert faults(metrics) == {
        "errors": 1,
        "empty": 2,
        "new_segments": 3,
        "prompt_too_long": 4,
        "timeouts": 1,
        "dropped_zero_variance": 4,
    }


def test_a_step_without_reward_shows_what_there_is() -> None:
    progress = Progress(total=5, clock=Clock())
    progress.advance(1)
    assert step_text(progress, {"episode/unscored": 4.0}) == "step 1/5  unscored 4  eta 0s"


@pytest.mark.parametrize(
    ("metrics", "text"),
    [
        ({"eval/reward": 0.5}, "reward 0.500"),
        ({"eval/reward": 1.0, "eval/accuracy": 0.25}, "reward 1.000  accuracy 0.250"),
        ({"eval/errors": 3.0}, "unscored  errors 3"),
        ({"eval/accuracy": 0.25}, "unscored  accuracy 0.250"),
    ],
)
def test_evaluation_text(metrics: dict[str, float], text: str) -> None:
    assert evaluation_text(metrics) == text


@pytest.mark.parametrize(
    ("values", "bars"),
    [([0.0, 0.5, 1.0], "▁▅█"), ([2.0, 2.0], "▁▁"), ([-1.0, 0.0], "▁█"), ([0.0] * 60 + [1.0], "▁" * 39 + "█")],
)
def test_sparkline(values: list[float], bars: str) -> None:
    assert sparkline(values) == bars


@pytest.mark.parametrize(("seconds", "text"), [(7.4, "7s"), (119, "119s"), (125, "2m 05s"), (7260, "2h 01m")])
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text
