"""Supervised steps on the envs' own experts before RL, through the same rollouts and masks as everything else."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from dataclasses import dataclass

from relax_gym.actor import Actor
from relax_gym.config import WarmupConfig
from relax_gym.env_driver import EnvDriver
from relax_gym.play import Episode, Player
from relax_gym.sampler import Session
from relax_gym.tasks import TaskSource, derive_seed
from relax_gym.trajectory import to_samples
from relax_gym.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstrations:
    """What one warm-up step (1-based) trains on, its advantages 0, and how many of its episodes failed."""

    step: int
    batch: Batch
    errors: int


async def demonstrations(
    config: WarmupConfig, player: Player, tasks: TaskSource, *, seed: int
) -> AsyncIterator[Demonstrations]:
    """The expert (now and then: any legal action) plays the episodes of each warm-up step. Failed ones are left out."""

    def open_session(driver: EnvDriver, session_seed: int) -> Session:
        rng = random.Random(session_seed)
        kinds = ("random_action", "expert_action")
        return Actor(lambda: driver.act(kinds[rng.random() < config.expert_probability]), player.renderer)

    for step in range(config.steps):
        numbers = range(step * config.episodes_per_step, (step + 1) * config.episodes_per_step)
        episodes = [
            Episode(
                id=f"warmup-{number}",
                task=tasks.task(number, stream="warmup"),
                seed=derive_seed(seed, "expert", number),
            )
            for number in numbers
        ]
        trajectories = await player.demonstrate(episodes, open_session)
        samples = [s for t in trajectories if t.error is None for s in to_samples(t, t.episode_id)]
        errors = sum(t.error is not None for t in trajectories)
        yield Demonstrations(step=step + 1, batch=Batch(version=0, samples=samples), errors=errors)
