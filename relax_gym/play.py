"""Plays groups of episodes with a sampler and scores them: what training, warm-up and evaluation share."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

from relax_gym.config import MediaConfig, RolloutConfig
from relax_gym.env_driver import EnvDriver
from relax_gym.media.loader import MediaLoader
from relax_gym.reward import is_group_reward
from relax_gym.rollout import Limits, Turnstile, rollout
from relax_gym.sampler import Sampler, SamplingParams, Session
from relax_gym.scoring import WeightedReward, close_rewards, reward_metrics, score, score_group
from relax_gym.timeline import episode_row, span
from relax_gym.types import Metrics, Task, Trajectory
from relax_gym.workers import WorkerThreads

if TYPE_CHECKING:
    from relax_gym.chat import ChatRenderer

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One episode to play: its task, a name for it and the seed of its sampling."""

    id: str
    task: Task
    seed: int


class Player:
    """Everything an episode needs besides its task."""

    def __init__(
        self,
        *,
        sampler: Sampler,
        renderer: ChatRenderer,
        rewards: Sequence[WeightedReward],
        config: RolloutConfig,
        media: MediaConfig | None = None,
    ) -> None:
        self.renderer = renderer
        self._loader = MediaLoader(media or MediaConfig(), processor=renderer.processor)
        self._sampler = sampler
        self._rewards = rewards
        self._config = config
        self._threads = WorkerThreads("env")
        self._reward_threads = WorkerThreads("reward", limit=16)
        self._turnstile = Turnstile()

    def open_sessions(self, count: int) -> list[Session]:
        """Open sessions in one go, before anything is awaited: a deterministic sampler then knows who is to come."""
        return [self._sampler.open_session() for _ in range(count)]

    async def play(
        self,
        episodes: Sequence[Episode],
        sessions: Sequence[Session],
        *,
        greedy: bool = False,
        on_end: Callable[[Trajectory], None] = lambda trajectory: None,
    ) -> list[Trajectory]:
        """Play and score episodes side by side, each in its session; results in the order given.

        Rewards of groups score the episodes of one task together, when the last of them has ended.
        The caller closes the sessions. Those that are not needed any more are closed here already, but for the last:
        it stays open until the caller has decided what comes after this group.
        """
        running = len(episodes)

        async def one(episode: Episode, session: Session) -> Trajectory:
            with episode_row(episode.id):
                return await play_one(episode, session)

        async def play_one(episode: Episode, session: Session) -> Trajectory:
            nonlocal running
            trajectory = await self._rollout(episode, lambda driver: session, greedy)
            running -= 1
            if running:
                session.close()
            with span("reward"):
                scored = await score(
                    trajectory, self._rewards, timeout=self._config.reward_timeout, threads=self._reward_threads
                )
            if not together:
                on_end(scored)
            return scored

        together = any(is_group_reward(term.reward) for term in self._rewards)
        plays = [one(*pair) for pair in zip(episodes, sessions, strict=True)]
        return await (self._play_groups(episodes, plays, on_end) if together else gather(plays))

    async def _play_groups(
        self,
        episodes: Sequence[Episode],
        plays: Sequence[Coroutine[Any, Any, Trajectory]],
        on_end: Callable[[Trajectory], None],
    ) -> list[Trajectory]:
        """The same for groups, the episodes that share a task; each is scored when its last episode has ended."""
        places: defaultdict[int, list[int]] = defaultdict(list)
        for place, episode in enumerate(episodes):
            places[id(episode.task)].append(place)

        async def group(members: Sequence[int]) -> list[Trajectory]:
            scored = await score_group(
                await gather([plays[place] for place in members]),
                self._rewards,
                timeout=self._config.reward_timeout,
                threads=self._reward_threads,
            )
            for trajectory in scored:
                on_end(trajectory)
            return scored

        groups = await gather([group(members) for members in places.values()])
        ended = dict(zip(chain(*places.values()), chain(*groups), strict=True))
        return [ended[place] for place in range(len(episodes))]

    async def demonstrate(
        self, episodes: Sequence[Episode], open_session: Callable[[EnvDriver, int], Session]
    ) -> list[Trajectory]:
        """Play episodes with sessions made from their env's driver and seed; nothing is scored."""

        def opener(seed: int) -> Callable[[EnvDriver], Session]:
            return lambda driver: open_session(driver, seed)

        return await gather([self._rollout(episode, opener(episode.seed), False) for episode in episodes])

    async def _rollout(
        self, episode: Episode, open_session: Callable[[EnvDriver], Session], greedy: bool
    ) -> Trajectory:
        config = self._config
        budget = config.token_budget or self._sampler.max_context
        return await rollout(
            episode.task,
            episode_id=episode.id,
            open_session=open_session,
            renderer=self.renderer,
            params=SamplingParams(
                max_new_tokens=config.max_new_tokens,
                temperature=0.0 if greedy else config.temperature,
                top_p=config.top_p,
                top_k=config.top_k,
                min_p=config.min_p,
                stop=config.stop,
                stop_token_ids=self.renderer.stop_token_ids,
                logit_bias=self.renderer.never_sampled,
                seed=episode.seed,
            ),
            limits=Limits(
                max_turns=config.max_turns,
                max_context=min(budget, self._sampler.max_context),
                step_timeout=config.step_timeout,
                episode_timeout=config.episode_timeout,
            ),
            threads=self._threads,
            loader=self._loader,
            turnstile=self._turnstile,
        )

    def reward_metrics(self) -> Metrics:
        """What the rewards counted since the last call."""
        return reward_metrics(self._rewards)

    async def aclose(self) -> None:
        """Close the rewards and end the workers."""
        await close_rewards(self._rewards, timeout=self._config.reward_timeout, threads=self._reward_threads)
        self._loader.close()
        self._threads.close()
        self._reward_threads.close()


def close_sessions(sessions: Sequence[Session]) -> None:
    """Close all; closing one twice does nothing."""
    for session in sessions:
        session.close()


async def gather(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all, in order; the first failure cancels the rest and is raised."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(coroutine) for coroutine in coroutines]
    return [task.result() for task in tasks]
