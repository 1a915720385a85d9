"""Plays the held-out episodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from relax_gym.build import Parts, build_parts
from relax_gym.cleanup import Cleanup
from relax_gym.config import RunConfig
from relax_gym.errors import ConfigError
from relax_gym.metrics import evaluation_metrics
from relax_gym.play import Episode, Player, close_sessions
from relax_gym.running import run
from relax_gym.tasks import TaskSource, derive_seed
from relax_gym.types import Metrics, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """Metrics under eval/ and the episodes they summarise."""

    metrics: Metrics
    trajectories: tuple[Trajectory, ...]


async def evaluate(
    player: Player, tasks: TaskSource, *, greedy: bool, on_end: Callable[[Trajectory], None] = lambda trajectory: None
) -> EvalResult:
    """Play all held-out tasks once, with the sampler's current weights."""
    episodes = [
        Episode(id=f"eval-{index}", task=task, seed=derive_seed("eval", index))
        for index, task in enumerate(tasks.eval_tasks())
    ]
    sessions = player.open_sessions(len(episodes))
    try:
        trajectories = await player.play(episodes, sessions, greedy=greedy, on_end=on_end)
    finally:
        close_sessions(sessions)
    return EvalResult(metrics=evaluation_metrics(trajectories), trajectories=tuple(trajectories))


def evaluate_run(config: RunConfig, *, model_path: Path | None = None, episodes: int | None = None) -> EvalResult:
    """Evaluate a model folder (default: the config's model) on the config's held-out tasks.

    Raises:
        ConfigError: there are no episodes to play.
    """
    if episodes is not None:
        config = config.model_copy(update={"eval": config.eval.model_copy(update={"episodes": episodes})})
    if config.eval.episodes == 0:
        raise ConfigError("eval.episodes is 0: nothing to evaluate; give --episodes N or set eval.episodes")
    return run(_evaluate_once(build_parts(config, model_path=model_path)))


async def _evaluate_once(parts: Parts) -> EvalResult:
    player = parts.player()
    async with Cleanup() as cleanup:
        cleanup.add(parts.sampler.aclose)
        cleanup.add(player.aclose)
        await parts.sampler.start()
        return await evaluate(player, parts.tasks, greedy=parts.context.config.eval.greedy)
