"""Supervised steps on the envs' own experts before RL, through the same rollouts and masks as everything else."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING

from relax_gym.config import WarmupConfig
from relax_gym.env import Env
from relax_gym.errors import ConfigError
from relax_gym.play import Episode, Player
from relax_gym.sampler import SamplingParams, Session
from relax_gym.tasks import TaskSource, derive_seed
from relax_gym.trajectory import to_samples
from relax_gym.types import Batch, Completion, FinishReason

if TYPE_CHECKING:
    from relax_gym.chat import ChatRenderer


def check_expert(env: Env, expert_probability: float) -> None:
    """Raise ConfigError unless the env can say what an expert, and other legal actions if they are wanted, would do."""
    needed = ("expert_action",) if expert_probability == 1 else ("expert_action", "random_action")
    if any(getattr(env, name, None) is None for name in needed):
        raise ConfigError(
            f"[warmup] needs {type(env.unwrapped).__name__}.expert_action(), and random_action() if "
            "expert_probability < 1; add them or leave [warmup] out"
        )


class ExpertSession(Session):
    """Answers with what the env's expert (now and then: any legal action) says, as the ids a policy would sample."""

    def __init__(self, env: Env, renderer: ChatRenderer, *, expert_probability: float, seed: int) -> None:
        check_expert(env, expert_probability)
        self._expert: Callable[[], str] = getattr(env, "expert_action")  # noqa: B009
        self._random: Callable[[], str] = getattr(env, "random_action", self._expert)
        self._renderer = renderer
        self._probability = expert_probability
        self._rng = random.Random(seed)

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """The expert's answer; log-probs and versions are 0."""
        act = self._expert if self._rng.random() < self._probability else self._random
        ids = self._renderer.encode_answer(act())
        zeros = (0,) * len(ids)
        return Completion(
            token_ids=ids, logprobs=tuple(map(float, zeros)), versions=zeros, finish_reason=FinishReason.STOP
        )

    def close(self) -> None:
        """Nothing to free."""


async def demonstrations(
    config: WarmupConfig, player: Player, tasks: TaskSource, *, seed: int
) -> AsyncIterator[tuple[int, Batch]]:
    """(step, batch) for each warm-up step, 1-based; the batch's advantages are 0."""

    def open_session(env: Env, session_seed: int) -> Session:
        return ExpertSession(env, player.renderer, expert_probability=config.expert_probability, seed=session_seed)

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
        yield step + 1, Batch(version=0, samples=samples)
