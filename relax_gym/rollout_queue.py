"""The slot-accounted, staleness-bounded queue between rollouts and learner.

Group slot n is trained in step n // groups_per_step, at policy version n // groups_per_step (one version a step). A
slot is admitted only when that is at most the published version + max_staleness, so every token trained at version v
was sampled at v - max_staleness or later, in flight and in queue included. With 0, a step's slots open only when its
version is out.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from relax_gym.errors import StalenessError
from relax_gym.types import Group


class RolloutQueue:
    """One producer, one consumer, one event loop. Every admitted slot ends consumed, queued, or dropped by reason."""

    def __init__(self, *, groups_per_step: int, max_staleness: int, first_step: int, last_step: int) -> None:
        self.dropped: Counter[str] = Counter()
        self.admitted = self.consumed = 0
        self._per_step = groups_per_step
        self._max_staleness = max_staleness
        self._version = first_step
        self._next = first_step * groups_per_step
        self._end = last_step * groups_per_step
        self._ready: dict[int, Group | None] = {}
        self._changed = asyncio.Condition()

    @property
    def queued(self) -> int:
        """Groups that are finished and wait for the learner."""
        return len(self.waiting())

    def waiting(self) -> list[Group]:
        """Those groups, in slot order."""
        return [group for slot in sorted(self._ready) if (group := self._ready[slot]) is not None]

    @property
    def in_flight(self) -> int:
        """Slots that were admitted and are not finished."""
        return self.admitted - self.consumed - self.queued - sum(self.dropped.values())

    def _may_admit(self) -> bool:
        return self._next >= self._end or self._next // self._per_step <= self._version + self._max_staleness

    async def admit(self) -> int | None:
        """The next slot, as soon as it may be sampled; None when the last step's slots are all out."""
        if not self._may_admit():
            async with self._changed:
                await self._changed.wait_for(self._may_admit)
        if self._next >= self._end:
            return None
        slot, self._next = self._next, self._next + 1
        self.admitted += 1
        return slot

    async def put(self, slot: int, group: Group) -> None:
        """Hand in a slot's finished group. Never waits for room: room was promised at admission."""
        await self._finish(slot, group)

    async def drop(self, slot: int, reason: str) -> None:
        """Leave a slot empty for good: its step trains on fewer groups."""
        self.dropped[reason] += 1
        await self._finish(slot, None)

    async def _finish(self, slot: int, group: Group | None) -> None:
        if slot in self._ready:
            raise ValueError(f"slot {slot} was handed in twice")
        self._ready[slot] = group  # before anything is awaited: a cancellation must not lose it
        async with self._changed:
            self._changed.notify_all()

    async def get(self, step: int) -> list[Group]:
        """The groups of a step in slot order, once all its slots are finished."""
        slots = range(step * self._per_step, (step + 1) * self._per_step)
        async with self._changed:
            await self._changed.wait_for(lambda: all(slot in self._ready for slot in slots))
        groups = [group for slot in slots if (group := self._ready[slot]) is not None]
        for group in groups:  # before they leave: what is refused still waits, and is kept with what waits
            self._check_lag(step, group)
        for slot in slots:
            del self._ready[slot]
        self.consumed += len(groups)
        return groups

    def _check_lag(self, step: int, group: Group) -> None:
        for trajectory in group.trajectories:
            oldest = min((min(t.completion.versions, default=step) for t in trajectory.turns), default=step)
            if step - oldest > self._max_staleness:
                raise StalenessError(
                    f"episode {trajectory.episode_id} holds tokens of version {oldest}, {step - oldest} behind version "
                    f"{step}; max_staleness is {self._max_staleness}"
                )

    async def advance(self, version: int) -> None:
        """The samplers now serve this version."""
        async with self._changed:
            self._version = version
            self._changed.notify_all()
