"""The slot-accounted, staleness-bounded queue between rollouts and learner; docs/async.md proves what it promises.

Step s trains at version s // update_every. A slot that is given out at version a is due at the last step whose version
is at most a + max_staleness. Slots are given out only while every one of them can be trained by the step it is due, and
a step takes a set after which that still holds, so every token trained at version v was sampled at v - max_staleness or
later, in flight and in queue included. With 0, a version's slots open only when it is out.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from relax_gym.errors import StalenessError
from relax_gym.types import Group, Trajectory

LATE = "late"
"""Why a group was dropped whose step had enough without it."""


@dataclass(slots=True)
class Account:
    """Where the groups are that were begun. A slot whose group is dropped and replaced has begun several."""

    admitted: int = 0
    consumed: int = 0
    queued: int = 0
    in_flight: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def check(self) -> None:
        """Raises RuntimeError when the numbers do not add up: a bug."""
        if self.admitted != self.consumed + self.queued + self.in_flight + sum(self.dropped.values()):
            raise RuntimeError(f"groups were lost or counted twice: {self}")


class RolloutQueue:
    """One producer, one consumer, one event loop.

    Args:
        order: "slot": a step takes its own slots; "ready": those that finish first, what is due before all others.
        oversample: slots given out beyond those that steps will take; only with "ready".
        update_every: steps between two versions.
        env_of: the index of a slot's `[[env]]`, for the accounts.
        unfinished: of a run that goes on, the slots it had begun and not trained on, which come first.
        on_late: called with each slot that is aborted, its group if that had finished, and whether it was left empty.
            What plays it must not hand it in any more; the slot comes out of `admit` again.
    """

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_staleness: int,
        first_step: int,
        last_step: int,
        order: Literal["slot", "ready"] = "slot",
        oversample: int = 0,
        update_every: int = 1,
        env_of: Callable[[int], int] = lambda slot: 0,
        unfinished: Sequence[int] = (),
        on_late: Callable[[int, Group | None, bool], None] = lambda slot, group, empty: None,
    ) -> None:
        self._per_step, self._max_staleness = groups_per_step, max_staleness
        self._in_order, self._oversample, self._every = order == "slot", oversample, update_every
        self._env_of, self._on_late = env_of, on_late
        self._step, self._last = first_step, last_step
        self._version = first_step // update_every
        self._next = first_step * groups_per_step + len(unfinished)
        self._waiting = sorted(unfinished)
        self._taken: list[int] = []  # by the last step
        self._due: dict[int, int] = {}  # the step at which each outstanding slot is due
        self._finished: dict[int, Group | None] = {}  # the outstanding slots that have ended, first ended first
        self._limit: int | None = None
        self._accounts: defaultdict[int, Account] = defaultdict(Account)
        self._changed = asyncio.Condition()

    # Accounts ---------------------------------------------------------------------------------------------------------

    def account(self, env: int | None = None) -> Account:
        """The groups of one env, or of all."""
        own = [account for index, account in self._accounts.items() if env in (None, index)]
        slots = [slot for slot in self._due if env in (None, self._env_of(slot))]
        return Account(
            admitted=sum(account.admitted for account in own),
            consumed=sum(account.consumed for account in own),
            queued=sum(self._finished.get(slot) is not None for slot in slots),
            in_flight=sum(slot not in self._finished for slot in slots),
            dropped=sum((account.dropped for account in own), Counter()),
        )

    def check(self) -> None:
        """Every group that was begun is in exactly one place. Raises RuntimeError otherwise."""
        for env in [None, *self._accounts]:
            self.account(env).check()

    @property
    def step(self) -> int:
        """The next step to be taken, counted from 0."""
        return self._step

    @property
    def in_flight(self) -> int:
        """Slots that were given out and are not finished."""
        return len(self._due) - len(self._finished)

    @property
    def queued(self) -> int:
        """Groups that are finished and wait for the learner."""
        return len(self.waiting())

    @property
    def unfinished(self) -> list[int]:
        """The slots that were begun and not taken by a step."""
        return sorted([*self._due, *self._waiting])

    def left_after(self, steps: int) -> list[int]:
        """The slots that were begun and are not among those of the first `steps` steps, of which at most one more was
        taken: `unfinished` of a run that goes on after them."""
        return sorted([*self.unfinished, *(self._taken if self._step > steps else ())])

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight, and nothing can be before the next version."""
        return not self.in_flight and (self._step >= self._last or not self._has_room())

    def waiting(self) -> list[Group]:
        """The groups that are finished and wait for the learner, in slot order."""
        return [group for slot in sorted(self._finished) if (group := self._finished[slot]) is not None]

    # The producer's side ----------------------------------------------------------------------------------------------

    async def admit(self) -> int | None:
        """The next slot, as soon as it may be sampled; None when the last step has its groups."""
        if not self._may_go_on():
            async with self._changed:
                await self._changed.wait_for(self._may_go_on)
        if self._step >= self._last:
            return None
        if self._waiting:
            slot = self._waiting.pop(0)
        else:
            slot, self._next = self._next, self._next + 1
        self._due[slot] = self._due_now()
        self._account_of(slot).admitted += 1
        return slot

    async def put(self, slot: int, group: Group) -> None:
        """Hand in a slot's finished group. Never waits for room: room was promised at admission.

        One that was sampled before a run was resumed may be older than its slot, and is due accordingly earlier.
        """
        if slot in self._due and (oldest := oldest_version(group)) is not None:
            self._due[slot] = min(self._due[slot], (oldest + self._max_staleness + 1) * self._every - 1)
        await self._finish(slot, group)

    async def drop(self, slot: int, reason: str) -> None:
        """Leave a slot empty for good: its step trains on fewer groups."""
        self._account_of(slot).dropped[reason] += 1
        await self._finish(slot, None)

    def replace(self, slot: int, reason: str) -> None:
        """A slot's group is dropped, and another one begun in its place."""
        account = self._account_of(slot)
        account.dropped[reason] += 1
        account.admitted += 1

    async def limit(self, groups: int | None) -> None:
        """Give out no slot while so many are in flight; None: as many as the bound allows."""
        async with self._changed:
            self._limit = groups if groups is None else max(1, groups)
            self._changed.notify_all()

    async def advance(self, version: int) -> None:
        """The samplers now serve this version."""
        async with self._changed:
            self._version = version
            self._changed.notify_all()

    def _may_go_on(self) -> bool:
        return self._step >= self._last or self._has_room()

    def _has_room(self) -> bool:
        if self._due_now() < self._step or (self._limit is not None and self.in_flight >= self._limit):
            return False
        places = (self._due_now() - self._step + 1) * self._per_step
        left = max(0, len(self._waiting) - 1)  # once the next slot is out
        return len(self._due) < places + max(0, self._oversample - left)

    def _due_now(self) -> int:
        return self._due_at(self._version)

    def _due_at(self, version: int) -> int:
        """The step at which what is given out at a version is due."""
        return min((version + self._max_staleness + 1) * self._every, self._last) - 1

    async def _finish(self, slot: int, group: Group | None) -> None:
        if slot in self._finished or slot not in self._due:
            raise ValueError(f"slot {slot} was handed in twice, or never given out")
        self._finished[slot] = group  # before anything is awaited: a cancellation must not lose it
        async with self._changed:
            self._changed.notify_all()

    # The consumer's side ----------------------------------------------------------------------------------------------

    async def get(self, step: int) -> list[Group]:
        """The groups of the next step in slot order, once enough have finished. What is too much is aborted then."""
        if step != self._step:
            raise ValueError(f"step {step} was asked for, but step {self._step} is the next")
        async with self._changed:
            await self._changed.wait_for(lambda: self._choose() is not None)
            slots = self._choose() or []
            groups = [group for slot in sorted(slots) if (group := self._finished[slot]) is not None]
            for group in groups:  # before they leave: what is refused still waits, and is kept with what waits
                self._check_lag(group)
            for slot in slots:
                del self._finished[slot], self._due[slot]
            for group in groups:
                self._account_of(group.slot).consumed += 1
            self._abort_excess()
            self._taken, self._step = slots, self._step + 1
            self._changed.notify_all()
        return groups

    async def next_finished(self, seen: set[int]) -> list[Group]:
        """The finished groups that the next step will take and that are not in `seen`, once there are some; none once
        the step can be taken. What is oversampled may overtake them, or is older in a run that goes on."""

        def fresh() -> list[Group]:
            return [g for slot in self._chosen() if slot not in seen and (g := self._finished[slot]) is not None]

        async with self._changed:
            await self._changed.wait_for(lambda: self._choose() is not None or fresh())
            return [] if self._choose() is not None else fresh()

    def leave_out(self, group: Group, reason: str) -> None:
        """A group that a step has taken is not trained on after all."""
        account = self._account_of(group.slot)
        account.consumed -= 1
        account.dropped[reason] += 1

    def _choose(self) -> list[int] | None:
        """The slots that the next step takes; None as long as it has to wait."""
        chosen = self._chosen()
        return chosen if len(chosen) == self._per_step else None

    def _chosen(self) -> list[int]:
        """The finished slots that the next step takes, whatever ends next."""
        if self._in_order:
            own = range(self._step * self._per_step, (self._step + 1) * self._per_step)
            return [slot for slot in own if slot in self._finished]
        chosen: dict[int, None] = {}
        places = 0  # that are given away, to slots that have not ended, too
        spare = max(0, self._oversample - len(self._waiting))
        for due in sorted(set(self._due.values())):
            must = min(self._per_step, self._too_many(due) - spare)
            ended = [slot for slot in self._finished if self._due[slot] <= due and slot not in chosen]
            chosen |= dict.fromkeys(ended[: max(0, must - places)])
            places = max(places, must)
        ended = [slot for slot in self._finished if slot not in chosen]
        return [*chosen, *ended[: self._per_step - places]]

    def _too_many(self, due: int) -> int:
        """How many more slots are due by a step than those after the next have places for."""
        return sum(step <= due for step in self._due.values()) - (due - self._step) * self._per_step

    def _abort_excess(self) -> None:
        for due in sorted(set(self._due.values())):
            early = [slot for slot, step in self._due.items() if step <= due]
            early.sort(key=lambda slot: (self._finished.get(slot) is not None, -slot))  # first what has cost least
            for slot in early[: max(0, self._too_many(due))]:
                empty = slot in self._finished and self._finished[slot] is None  # and counted as dropped already
                group = self._finished.pop(slot, None)
                del self._due[slot]
                self._account_of(slot).dropped[LATE] += not empty
                self._waiting = sorted([*self._waiting, slot])
                self._on_late(slot, group, empty)

    def _check_lag(self, group: Group) -> None:
        version = self._step // self._every
        for trajectory in group.trajectories:
            oldest = _oldest([trajectory], version)
            if version - oldest > self._max_staleness:
                raise StalenessError(
                    f"episode {trajectory.episode_id} holds tokens of version {oldest}, {version - oldest} behind "
                    f"version {version}; max_staleness is {self._max_staleness}"
                )

    def _account_of(self, slot: int) -> Account:
        return self._accounts[self._env_of(slot)]


def oldest_version(group: Group) -> int | None:
    """The first version that sampled a token of a group; None if it has no tokens."""
    return min((v for t in group.trajectories for turn in t.turns for v in turn.completion.versions), default=None)


def _oldest(trajectories: Sequence[Trajectory], default: int) -> int:
    """The version of the oldest token of some episodes."""
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    return min((min(turn.completion.versions, default=default) for turn in turns), default=default)
