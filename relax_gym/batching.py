"""Rewards that score many episodes at once, such as a model: asked about all that are ready, after a short wait."""

from __future__ import annotations

import asyncio
import inspect
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

from relax_gym.errors import RewardError
from relax_gym.reward import Score
from relax_gym.types import Trajectory
from relax_gym.workers import WorkerThreads

SIZE, WAIT = 32, 0.05
Asked = tuple[Trajectory, "asyncio.Future[Score]"]


class BatchReward(Protocol):
    """Has `batch`, sync or async, and perhaps `batch_size` (32) and `batch_wait` (0.05), in seconds."""

    def batch(self, trajectories: Sequence[Trajectory], /) -> Any:
        """A score, as a `Reward` returns it, for each episode, in order; an exception says why one has none."""
        ...


class Batched:
    """A reward of single episodes that asks one of batches.

    A batch goes when it has `batch_size` episodes, or `batch_wait` seconds after its first one came. When `batch`
    raises, or returns another number of scores, none of its episodes has one.
    """

    def __init__(self, reward: BatchReward) -> None:
        self._reward, self.key = reward, getattr(reward, "key", None)
        self._size, self._wait = getattr(reward, "batch_size", SIZE), getattr(reward, "batch_wait", WAIT)
        if self._size < 1 or not self._wait >= 0:
            raise RewardError(f"batch_size is {self._size} and batch_wait {self._wait}; give at least 1 and 0")
        if getattr(reward, "isolated", False):
            raise RewardError("a reward with batch cannot be isolated; leave out one of the two")
        self._threads = WorkerThreads("batch")
        self._waiting: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, list[Asked]] = weakref.WeakKeyDictionary()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __call__(self, trajectory: Trajectory, /) -> Score:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Score] = loop.create_future()
        batch = self._waiting.setdefault(loop, [])
        batch.append((trajectory, answer))
        if len(batch) == self._size:
            self._send(loop, batch)
        elif len(batch) == 1:
            loop.call_later(self._wait, self._send, loop, batch)
        return await answer

    def metrics(self) -> Any:
        """What the reward counts."""
        return self._reward.metrics() if hasattr(self._reward, "metrics") else {}

    async def close(self) -> None:
        """Close the reward."""
        closing = self._reward.close() if hasattr(self._reward, "close") else None
        if inspect.isawaitable(closing):
            await closing
        self._threads.close()

    def _send(self, loop: asyncio.AbstractEventLoop, batch: list[Asked]) -> None:
        if self._waiting.get(loop) is batch:  # else it was full and has gone before its time
            del self._waiting[loop]
            task = loop.create_task(self._score([one for one in batch if not one[1].done()]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _score(self, batch: list[Asked]) -> None:
        episodes = [trajectory for trajectory, _ in batch]
        try:
            if inspect.iscoroutinefunction(self._reward.batch):
                scores = await self._reward.batch(episodes)
            else:
                scores = await self._threads.call(self._reward.batch, episodes)
            if not isinstance(scores, Sequence) or len(scores) != len(episodes):
                raise RewardError(
                    f"batch returned {scores!r:.100} for {len(episodes)} episodes; give one score for each"
                )
        except Exception as error:
            scores = [error] * len(episodes)
        for (_, answer), score in zip(batch, scores, strict=True):
            if answer.done():
                continue
            if isinstance(score, Exception):
                answer.set_exception(score)
            else:
                answer.set_result(score)
