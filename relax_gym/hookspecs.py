"""The hooks a plugin may implement. Pluggy project name and entry-point group: `relax_gym`.

`register_*` hooks return a mapping from name to a value or to the string `"module:attribute"`, which is imported only
when the name is used. Observers return nothing; an observer that raises ends the run, because it is part of the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    import typer

    from relax_gym.context import RunContext
    from relax_gym.registry import Component, EnvSpec
    from relax_gym.types import Batch, Metrics, Trajectory

PROJECT = "relax_gym"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def register_envs() -> Mapping[str, EnvSpec | str | type]:  # type: ignore[empty-body]
    """Environments by id (`namespace/Name-v0`): an `Env` class, a `"module:Class"` string or an `EnvSpec`."""


@hookspec
def register_rewards() -> Mapping[str, Any]:  # type: ignore[empty-body]
    """Rewards by name: a factory that takes the keyword arguments of `[[reward]]` and returns a `Reward`."""


@hookspec
def register_algorithms() -> Mapping[str, Any]:  # type: ignore[empty-body]
    """Algorithms by name: a subclass of `relax_gym.Algorithm`, whose fields are the options of `[algorithm]`."""


@hookspec
def register_learners() -> Mapping[str, Component | str]:  # type: ignore[empty-body]
    """Learners by name: a `Component` whose factory takes (RunContext, options) and returns a `Learner`."""


@hookspec
def register_samplers() -> Mapping[str, Component | str]:  # type: ignore[empty-body]
    """Samplers by name: a `Component` whose factory takes (RunContext, options) and returns a `Sampler`."""


@hookspec
def register_teachers() -> Mapping[str, Component | str]:  # type: ignore[empty-body]
    """Teacher engines by name: a `Component` whose factory takes (RunContext, options, the teacher's model name) and
    returns a `relax_gym.teacher.Teacher`.
    """


@hookspec
def register_trackers() -> Mapping[str, Component | str]:  # type: ignore[empty-body]
    """Metric trackers by name: a `Component` whose factory takes (RunContext, options) and returns a `Tracker`."""


@hookspec
def register_commands(app: typer.Typer) -> None:
    """Add subcommands to the `relax-gym` command line."""


@hookspec
def on_run_start(context: RunContext) -> None:
    """The run folder exists and everything is loaded; no episode has started."""


@hookspec
def on_episode_end(step: int, trajectory: Trajectory, evaluation: bool) -> None:
    """An episode is finished and scored. `step` is the optimizer step it was sampled for."""


@hookspec
def on_warmup_step(step: int, metrics: Metrics) -> None:
    """A supervised step on the env's expert is done (1-based)."""


@hookspec
def on_evaluation(step: int, metrics: Metrics) -> None:
    """The held-out episodes were played with the policy after `step` optimizer steps."""


@hookspec
def on_batch(batch: Batch) -> None:
    """The learner is about to train on this batch."""


@hookspec
def on_step_end(step: int, metrics: Metrics) -> None:
    """Step `step` (1-based) is trained and published; `metrics` is everything that is logged for it."""


@hookspec
def on_checkpoint(step: int, folder: Path) -> None:
    """A checkpoint is complete on disk."""


@hookspec
def on_run_end(context: RunContext) -> None:
    """The run is over, by success or failure. Called exactly once if on_run_start was."""
