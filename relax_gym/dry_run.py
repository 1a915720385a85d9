"""What a run would do, found without it: no weight is loaded and nothing is written to the run folder."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from relax_gym.actor import Actor
from relax_gym.build import build_context, build_renderer, build_rewards, check_learner
from relax_gym.cleanup import Cleanup, closed_on_failure
from relax_gym.config import ModelConfig, RunConfig, dump_config, load_algorithms, plugin_options
from relax_gym.env_driver import EnvDriver
from relax_gym.errors import ModelError, RelaxGymError
from relax_gym.launch import serving
from relax_gym.media.loader import MediaLoader
from relax_gym.models import empty_language_model, language_config, positions, resolve_model
from relax_gym.plugins import plugins
from relax_gym.preflight import check_tools, probe_envs
from relax_gym.redaction import check_secrets
from relax_gym.rollout import Limits, rollout
from relax_gym.run_folder import check_run_folder
from relax_gym.sampler import SamplingParams, Session
from relax_gym.scoring import WeightedReward, close_rewards, score, score_group
from relax_gym.tasks import TaskSource
from relax_gym.types import StopReason, Task, Trajectory
from relax_gym.view import printable
from relax_gym.workers import WorkerThreads

if TYPE_CHECKING:
    from relax_gym.chat import ChatRenderer
    from relax_gym.template import TemplateReport

GARBAGE = "?"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The model of a run. `context` is the most tokens it can see in the run's sampler, where that is known."""

    name: str
    path: Path
    architecture: str
    parameters: int
    context: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """One episode of one env, played without a model. `prompt` is the first one, as the model would see it."""

    env_id: str
    actor: str
    prompt: str
    prompt_tokens: int
    longest_answer: int
    trajectory: Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunReport:
    """What `relax-gym train --dry-run` found. With a failure the run would not start, or learn nothing from an env."""

    config: RunConfig
    model: ModelFacts
    template: TemplateReport
    rehearsals: tuple[Rehearsal, ...]
    episodes_per_step: int
    max_tokens_per_step: int
    failures: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def dry_run(config: RunConfig, *, resume: bool = False) -> DryRunReport:
    """Resolve and build what a run needs and play one episode of each env with its expert, else any legal actions.

    Raises:
        RelaxGymError: what the run itself would raise before its first episode, as far as that takes no weights and
            no server.
    """
    check_secrets(config)
    serving(config)
    probes = probe_envs(config)
    with closed_on_failure() as built:
        rewards = build_rewards(config)
        built.add(partial(close_rewards, rewards, timeout=config.rollout.reward_timeout))
        shortages = TaskSource(config.env, seed=config.seed, eval_episodes=config.eval.episodes).shortages()
        path = resolve_model(config.model)
        model = _model_facts(config, path)
        renderer = build_renderer(config, path)
        check_tools(probes, renderer)
        _resolve_teachers(config)
        check_learner(build_context(config, path, renderer))
        tasks = _first_tasks(config)
    budget = min(filter(None, (config.rollout.token_budget, model.context)), default=sys.maxsize)
    rehearsals = asyncio.run(_rehearse(config, tasks, renderer, rewards, budget))
    episodes = config.train.groups_per_step * config.train.group_size
    longest = min(config.rollout.max_turns * config.rollout.max_new_tokens, budget)
    report = DryRunReport(
        config=config,
        model=model,
        template=renderer.report(),
        rehearsals=tuple(rehearsals),
        episodes_per_step=episodes,
        max_tokens_per_step=episodes * longest,
    )
    warnings = (*shortages, *_warnings(report, budget))
    return dataclasses.replace(report, failures=tuple(_failures(report, resume)), warnings=warnings)


def _model_facts(config: RunConfig, path: Path) -> ModelFacts:
    trust = config.model.trust_remote_code
    try:
        settings = language_config(path, trust_remote_code=trust)
        model = empty_language_model(settings, trust_remote_code=trust)
    except Exception as error:  # an unknown architecture, or remote code, which can raise anything
        raise ModelError(f"model folder {path} cannot be built: {error}") from error
    section = config.sampler
    options_type = plugins().get("sampler", section.name).load_options()
    options = plugin_options(section, options_type, source="config", key="sampler")
    return ModelFacts(
        name=config.model.name,
        path=path,
        architecture=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        context=options.context_limit(positions(settings)),
    )


def _resolve_teachers(config: RunConfig) -> None:
    """Find the models that the algorithms distil from, as the learner would. An engine knows its own models."""
    asked = [algorithm.distillation for algorithm in load_algorithms(config)]
    for name in {name for one in asked if one and one.engine is None for name in one.names}:
        resolve_model(ModelConfig(name=name, trust_remote_code=config.model.trust_remote_code))


def _first_tasks(config: RunConfig) -> list[Task]:
    """The first training task that each env would have if it were the only one."""
    return [TaskSource([env], seed=config.seed, eval_episodes=config.eval.episodes).task(0) for env in config.env]


def _actor(driver: EnvDriver, renderer: ChatRenderer) -> tuple[str, Actor]:
    """Says what the env's expert says, else any legal action, else garbage."""
    for name, method in (("expert", "expert_action"), ("legal actions", "random_action")):
        if driver.offers(method):
            return name, Actor(partial(driver.act, method), renderer)
    return "garbage", Actor(_garbage, renderer)


async def _garbage() -> str:
    return GARBAGE


async def _rehearse(
    config: RunConfig,
    tasks: Sequence[Task],
    renderer: ChatRenderer,
    rewards: Sequence[WeightedReward],
    budget: int,
) -> list[Rehearsal]:
    """Play and score one episode of each task; then the rewards are closed."""
    timeout, threads = config.rollout.reward_timeout, WorkerThreads("env")
    rehearsals: list[Rehearsal] = []
    loader = MediaLoader(config.media, processor=renderer.processor)
    async with Cleanup() as cleanup:
        cleanup.add(threads.close)
        cleanup.add(loader.close)
        cleanup.add(partial(close_rewards, rewards, timeout=timeout, threads=threads))
        for task in tasks:
            actor, trajectory = await _play(task, f"dry-{len(rehearsals)}", config, renderer, budget, threads, loader)
            trajectory = await score(trajectory, rewards, timeout=timeout, threads=threads)
            alike = [trajectory] * config.train.group_size  # rewards of groups may need others
            trajectory, *_ = await score_group(alike, rewards, timeout=timeout, threads=threads)
            rehearsals.append(_rehearsal(task, actor, trajectory, renderer))
    return rehearsals


async def _play(
    task: Task,
    episode_id: str,
    config: RunConfig,
    renderer: ChatRenderer,
    budget: int,
    threads: WorkerThreads,
    loader: MediaLoader,
) -> tuple[str, Trajectory]:
    rules = config.rollout
    actors: list[str] = []

    def open_session(driver: EnvDriver) -> Session:
        name, session = _actor(driver, renderer)
        actors.append(name)
        return session

    trajectory = await rollout(
        task,
        episode_id=episode_id,
        open_session=open_session,
        renderer=renderer,
        params=SamplingParams(
            max_new_tokens=rules.max_new_tokens, stop=rules.stop, stop_token_ids=renderer.stop_token_ids
        ),
        limits=Limits(
            max_turns=rules.max_turns,
            max_context=budget,
            step_timeout=rules.step_timeout,
            episode_timeout=rules.episode_timeout,
        ),
        threads=threads,
        loader=loader,
    )
    return actors[-1] if actors else "nobody", trajectory


def _rehearsal(task: Task, actor: str, trajectory: Trajectory, renderer: ChatRenderer) -> Rehearsal:
    prompt = trajectory.turns[0].context_ids if trajectory.turns else ()
    return Rehearsal(
        env_id=task.env_id,
        actor=actor,
        prompt=str(renderer.tokenizer.decode(list(prompt))),
        prompt_tokens=len(prompt),
        longest_answer=max((len(turn.completion.token_ids) for turn in trajectory.turns), default=0),
        trajectory=trajectory,
    )


def _failures(report: DryRunReport, resume: bool) -> Iterator[str]:
    try:
        check_run_folder(report.config, resume=resume)
    except RelaxGymError as refusal:
        yield str(refusal)
    for rehearsal in report.rehearsals:
        trajectory = rehearsal.trajectory
        if (error := trajectory.error) is not None:
            yield f"{rehearsal.env_id}: the episode failed at turn {error.turn}: {error.message}"
        elif trajectory.stop_reason is StopReason.TIMEOUT:
            yield f"{rehearsal.env_id}: the episode took longer than rollout.episode_timeout"
        elif trajectory.stop_reason is StopReason.PROMPT_TOO_LONG:
            yield f"{rehearsal.env_id}: the first prompt does not fit in the context"


def _warnings(report: DryRunReport, budget: int) -> Iterator[str]:
    config = report.config
    if config.eval.episodes == 0:
        yield "eval.episodes is 0: nothing will show whether held-out episodes get better"
    if not report.template.prefix_preserving:
        yield "the chat template rewrites past turns: episodes are trained as several segments"
    for rehearsal in report.rehearsals:
        for warning in _rehearsal_warnings(rehearsal, config, budget):
            yield f"{rehearsal.env_id}: {warning}"


def _rehearsal_warnings(rehearsal: Rehearsal, config: RunConfig, budget: int) -> Iterator[str]:
    trajectory, rules = rehearsal.trajectory, config.rollout
    if trajectory.error is not None:
        return
    for name, reason in trajectory.reward_failures.items():
        yield f"reward {name!r} could not score the episode: {reason}"
    if trajectory.stop_reason is StopReason.MAX_TURNS:
        yield f"the episode did not end within rollout.max_turns = {rules.max_turns}"
    if trajectory.stop_reason is StopReason.TOKEN_BUDGET:
        yield f"the episode did not end within {budget} tokens"
    if rehearsal.longest_answer > rules.max_new_tokens:
        yield (
            f"an answer of the {rehearsal.actor} has {rehearsal.longest_answer} tokens, "
            f"more than rollout.max_new_tokens = {rules.max_new_tokens}"
        )


def render(report: DryRunReport) -> str:
    """The report for people."""
    model, config = report.model, report.config
    template = dataclasses.asdict(report.template)
    sections = [
        ("config", dump_config(config).strip()),
        (
            "model",
            f"{model.name}: {model.architecture}, {model.parameters:,} parameters, "
            f"context {model.context or 'unknown'} tokens\n{model.path}",
        ),
        ("chat template", "\n".join(f"{key}: {value}" for key, value in template.items())),
        *((f"env {rehearsal.env_id}", _render_rehearsal(rehearsal)) for rehearsal in report.rehearsals),
        (
            "each step",
            f"{config.train.groups_per_step} groups of {config.train.group_size}: {report.episodes_per_step} episodes, "
            f"at most {report.max_tokens_per_step:,} sampled tokens; {config.train.steps} steps, "
            f"held-out episodes of each env: {config.eval.episodes}",
        ),
        ("warnings", "\n".join(report.warnings) or "none"),
        ("failures", "\n".join(report.failures) or "none"),
    ]
    return "\n\n".join(f"== {title}\n{printable(body)}" for title, body in sections)


def _render_rehearsal(rehearsal: Rehearsal) -> str:
    trajectory = rehearsal.trajectory
    lines = [
        f"first prompt, {rehearsal.prompt_tokens} tokens:",
        rehearsal.prompt,
        f"an episode of the {rehearsal.actor}:",
    ]
    for turn in trajectory.turns:
        reward = "no answer" if turn.reward is None else f"reward {turn.reward:g}"
        lines.append(f"  {turn.action!r} ({len(turn.completion.token_ids)} tokens) → {reward}")
    rewards = ", ".join(f"{name} {value}" for name, value in trajectory.rewards.items())
    lines.append(f"  {trajectory.stop_reason}, reward {trajectory.reward} ({rewards})")
    return "\n".join(lines)
