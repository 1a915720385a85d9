"""A model of queue and loop whose transitions are the real queue's methods, explored through every order of events.

A coroutine of the queue is run until it is done or has to wait; one that has to wait is not an event that can happen.
"""

from __future__ import annotations

import asyncio
import copy
from collections import Counter
from collections.abc import Coroutine, Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from relax_gym.rollout_queue import RolloutQueue, oldest_version
from relax_gym.types import Completion, FinishReason, Group, StopReason, Task, Trajectory, Turn

T = TypeVar("T")


def group(slot: int, version: int) -> Group:
    """A group of one episode with one token of this version."""
    said = Completion(token_ids=(1,), logprobs=(0.0,), versions=(version,), finish_reason=FinishReason.STOP)
    turn = Turn(observation=(), context_ids=(0,), completion=said, text="", action="")
    one = Trajectory(
        task=Task(env_id="a/B-v0", seed=slot), episode_id=str(slot), turns=(turn,), stop_reason=StopReason.ENV_DONE
    )
    return Group(group_id=str(slot), slot=slot, trajectories=(one,))


class MustWaitError(Exception):
    """The call cannot be answered now."""


def now(call: Coroutine[Any, Any, T]) -> T:
    """The answer of a call that has not to wait. Needs a running loop, which does not get to run."""
    try:
        call.send(None)
    except StopIteration as done:
        answer: T = done.value
        return answer
    try:
        call.throw(asyncio.CancelledError)
    except asyncio.CancelledError:
        raise MustWaitError from None
    raise AssertionError("it goes on waiting after it was cancelled")


@dataclass(kw_only=True)
class Size:
    """One corner of the small model."""

    groups_per_step: int
    max_staleness: int
    last_step: int
    order: str = "slot"
    oversample: int = 0
    update_every: int = 1
    limit: int | None = None
    drops: int = 1

    def queue(self, first_step: int, unfinished: list[int]) -> RolloutQueue:
        """A queue of this size."""
        options = {key: value for key, value in vars(self).items() if key not in ("limit", "drops")}
        queue = RolloutQueue(**options, first_step=first_step, unfinished=unfinished, env_of=lambda slot: slot % 2)
        queue._limit = self.limit
        return queue


@dataclass
class World:
    """Queue and loop between two events. `training` is the step that the learner is at."""

    size: Size
    queue: RolloutQueue
    step: int
    training: bool = False
    running: dict[int, int] = field(default_factory=dict)  # slots in flight, with the version of their first token
    version: int = 0
    drops: int = 0
    consumed: Counter[int] = field(default_factory=Counter)

    def fork(self) -> World:
        """The same, to go on from in another way."""
        other = copy.copy(self)
        other.running, other.consumed = dict(self.running), Counter(self.consumed)
        other.queue = queue = copy.copy(self.queue)
        queue._due, queue._finished, queue._waiting = dict(queue._due), dict(queue._finished), list(queue._waiting)
        queue._accounts, queue._changed = queue._accounts.copy(), asyncio.Condition()
        for env, account in queue._accounts.items():
            queue._accounts[env] = replace(account, dropped=Counter(account.dropped))
        queue._on_late = lambda slot, late, empty: other.running.pop(slot, None)
        return other

    @property
    def key(self) -> Hashable:
        """Equal for worlds that have the same future."""
        queue = self.queue
        finished = tuple((slot, one and oldest_version(one)) for slot, one in queue._finished.items())
        if queue._in_order:
            finished = tuple(sorted(finished, key=lambda one: one[0]))
        running = tuple(sorted(self.running.items()))
        due = tuple(sorted(queue._due.items()))
        return (
            self.step,
            self.training,
            self.version,
            self.drops,
            queue._next,
            (*queue._waiting,),
            running,
            finished,
            due,
        )

    @property
    def over(self) -> bool:
        """The last step is done and nothing is left."""
        return self.step == self.size.last_step and not self.running

    def futures(self) -> Iterator[tuple[str, World]]:
        """Each event that can happen now, with the world after it."""
        for name in (
            "admit",
            "take",
            "publish",
            "resume",
            "resume_kept",
            *(f"{end} {slot}" for slot in self.running for end in ENDS),
        ):
            world = self.fork()
            event, *slot = name.split()
            try:
                happened = getattr(world, f"_{event}")(*map(int, slot))
            except MustWaitError:
                continue
            if happened:
                world.check()
                yield name, world

    def check(self) -> None:
        """What holds after every event."""
        queue, size = self.queue, self.size
        queue.check()
        assert set(self.running) == set(queue._due) - set(queue._finished)
        assert queue._next == queue._step * size.groups_per_step + len(queue.unfinished), "a slot was lost"
        for due in set(queue._due.values()):
            outstanding = sum(step <= due for step in queue._due.values()) + len(queue._waiting)
            assert outstanding <= (due - queue._step + 1) * size.groups_per_step + size.oversample, "too many are due"

    def _admit(self) -> bool:
        slot = now(self.queue.admit())
        if slot is None:
            return False
        self.running[slot] = self.version
        return True

    def _finish(self, slot: int) -> bool:
        now(self.queue.put(slot, group(slot, self.running.pop(slot))))
        return True

    def _drop(self, slot: int) -> bool:
        if self.drops == self.size.drops:
            return False
        self.drops += 1
        self.running.pop(slot)
        now(self.queue.drop(slot, "dull"))
        return True

    def _take(self) -> bool:
        if self.training or self.step == self.size.last_step:
            return False
        late = self.queue.account().dropped["late"]
        groups = now(self.queue.get(self.step))  # raises StalenessError
        assert len(groups) <= self.size.groups_per_step
        assert self.queue.account().dropped["late"] - late <= self.size.oversample
        self.consumed.update(one.slot for one in groups)
        assert max(self.consumed.values(), default=1) == 1, "a slot was trained on twice"
        self.training = True
        return True

    def _publish(self) -> bool:
        """The step ends, and every few of them its weights are published."""
        if not self.training:
            return False
        self.training, self.step = False, self.step + 1
        if self.step % self.size.update_every == 0:
            self.version = self.step // self.size.update_every
            now(self.queue.advance(self.version))
        return True

    def _resume(self) -> bool:
        """The run breaks off after a step, and goes on from its checkpoint. What it had in hand is gone."""
        if self.training or self.step in (0, self.size.last_step) or not (self.running or self.queue._finished):
            return False
        self.version, self.running = self.step // self.size.update_every, {}
        self.queue = self.size.queue(self.step, self.queue.unfinished)
        self.queue._on_late = lambda slot, late, empty: self.running.pop(slot, None)
        return True

    def _resume_kept(self) -> bool:
        """The same, but finished groups are kept, each handed in as its slot is given out again. The producer gives out
        all slots that were begun before a step can be asked for: no limit is known until an episode has ended."""
        kept = {one.slot: one for one in self.queue.waiting()}
        if not kept or not self.size.max_staleness or not self._resume():
            return False
        self.queue._limit = None
        for slot in self.queue.unfinished:
            self._admit()
            if slot in kept:
                self.running.pop(slot)
                now(self.queue.put(slot, kept[slot]))
        self.queue._limit = self.size.limit
        return True


ENDS = ("finish", "drop")


async def explore(size: Size) -> tuple[int, int]:
    """Go through every order of events; the number of worlds seen, and of those in which the run is over.

    Raises:
        AssertionError: something that must hold does not, or the run waits for ever; the events are in the message.
    """
    start = World(size, size.queue(0, []), 0).fork()
    seen, over = {start.key}, 0
    stack: list[tuple[World, tuple[str, ...]]] = [(start, ())]
    while stack:
        world, path = stack.pop()
        stuck = not world.over
        over += world.over
        try:
            for name, after in world.futures():
                stuck = False
                if after.key not in seen:
                    seen.add(after.key)
                    stack.append((after, (*path, name)))
        except Exception as error:
            raise AssertionError(f"{size} after {path}: {error!r}") from error
        assert not stuck, f"{size} waits for ever after {path}"
    return len(seen), over
