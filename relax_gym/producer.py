"""The producer's side of the queue: a group of episodes for every slot that may begin."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from relax_gym.build import Parts
from relax_gym.credit import drop_reason
from relax_gym.kept_groups import KeptGroups, newest_version
from relax_gym.meters import RolloutMeter
from relax_gym.play import Episode, Player, close_sessions
from relax_gym.rollout_queue import LATE, RolloutQueue
from relax_gym.sampler import Session
from relax_gym.tasks import derive_seed
from relax_gym.timeline import count
from relax_gym.types import Group, Trajectory
from relax_gym.writer import Writer

SLOTS_FILE = "slots.json"
STALE = "stale"
"""Why a group was dropped that was sampled by weights which a run that was killed has lost."""


def read_slots(checkpoint: Path | None) -> dict[int, int]:
    """What `Producer.slots_file` gave: each slot, and how often it was aborted. Nothing without a checkpoint."""
    if checkpoint is None or not (checkpoint / SLOTS_FILE).exists():
        return {}
    return {int(slot): aborts for slot, aborts in json.loads((checkpoint / SLOTS_FILE).read_text()).items()}


class Producer:
    """Plays groups into a queue until the last step has its own.

    A slot's first group is named after the slot, its replacements `r1`, `r2` …; `a1`, `a2` … count how often the slot
    was aborted before and begun anew, with the same task and other sampling seeds.
    """

    def __init__(
        self,
        parts: Parts,
        player: Player,
        writer: Writer,
        on_episode: Callable[[int, bool, Trajectory], None],
        checkpoint: Path | None = None,
    ) -> None:
        """`on_episode` is called with each episode that has ended, its step and whether it was an evaluation; a run
        that goes on from a `checkpoint` first plays the slots that had been begun."""
        left = read_slots(checkpoint)
        self._parts, self._player, self._writer, self._on_episode = parts, player, writer, on_episode
        self._config = parts.context.config.train
        self.queue = RolloutQueue(
            groups_per_step=self._config.groups_per_step,
            max_staleness=self._config.max_staleness,
            first_step=parts.context.start_step,
            last_step=self._config.steps,
            order=self._config.order,
            oversample=self._config.oversample,
            update_every=self._config.update_every,
            env_of=parts.tasks.mixture,
            unfinished=sorted(left),
            on_late=self._abort,
        )
        self.kept = KeptGroups(writer, enabled=self._config.max_staleness > 0)
        self.meter = RolloutMeter()
        self._resumed: dict[int, Group] = {}
        self._dropped: defaultdict[int, Counter[str]] = defaultdict(Counter)
        self._playing: dict[int, asyncio.Task[None]] = {}
        self._aborted: set[asyncio.Task[None]] = set()
        self._aborts = Counter(left)
        self._mean_context: float | None = None

    def begin(self, *, resumed: bool) -> None:
        """Begin the run folder; go on with the groups that the run had finished, and not trained on, before. Blocks."""
        self._writer.folder.begin(self._parts.context.start_step)
        unfinished = self.queue.unfinished
        first_new = self._parts.context.start_step * self._config.groups_per_step + len(unfinished)
        self._resumed = self.kept.begin(resumed=resumed, unfinished=unfinished, first_new=first_new)
        for slot, group in self._resumed.items():
            if self._lost(group):  # not only once its slot begins: a later run would have weights of that version, too
                self.kept.forget(slot)

    async def run(self) -> None:
        """Start a group for every slot the queue admits. A slot's sessions open before anything is awaited."""
        async with asyncio.TaskGroup() as groups:
            while (slot := await self.queue.admit()) is not None:
                playing = groups.create_task(self._fill(slot, self._player.open_sessions(self._config.group_size)))
                self._playing[slot] = playing
                self.meter.group_begins()
                self.count()
                playing.add_done_callback(partial(self._ended, slot))

    def count(self) -> None:
        """Say in the timeline how many groups there are."""
        count("groups", **{"in flight": self.queue.in_flight, "waiting": self.queue.queued})

    def slots_file(self, steps: int) -> dict[str, str]:
        """Name and content of what a checkpoint after so many steps says of slots begun and not trained on."""
        return {SLOTS_FILE: json.dumps({slot: self._aborts[slot] for slot in self.queue.left_after(steps)})}

    async def settle(self) -> None:
        """Wait until the episodes of aborted groups have let go of the sampler."""
        if self._aborted:
            await asyncio.wait(self._aborted)

    def step_of(self, slot: int) -> int:
        """The number, counted from 1, of the step that a slot would be taken by if all were taken in order."""
        return slot // self._config.groups_per_step + 1

    def keep_waiting(self) -> None:
        """Write the finished groups that no step has taken to the run folder."""
        for group in self.queue.waiting():
            self._writer.add_group(self.step_of(group.slot), group, kind="queued")

    def record_drop(self, step: int, group: Group, reason: str) -> None:
        """Keep a group that is not trained on, and count why."""
        self._writer.add_group(step, group, kind=reason)
        self._dropped[step][reason] += 1

    def take_dropped(self, step: int) -> Counter[str]:
        """How many groups were dropped up to this step and not reported yet, by reason."""
        return sum((self._dropped.pop(known) for known in sorted(self._dropped) if known <= step), Counter())

    async def _fill(self, slot: int, sessions: list[Session]) -> None:
        """Play a slot's group; while a filter drops it, play another task in its place."""
        replacements = self._config.max_replacements
        try:
            if (group := self._take_resumed(slot)) is not None:
                return await self.queue.put(slot, group)
            for attempt in range(replacements + 1):
                group = await self._play_group(slot, attempt, sessions)
                reason = self._drop_reason(group)
                if reason is None:
                    self.kept.keep(group)
                    return await self.queue.put(slot, group)
                self.record_drop(self.queue.step + 1, group, reason)
                if attempt == replacements:
                    return await self.queue.drop(slot, reason)
                self.queue.replace(slot, reason)
                finished, sessions = sessions, self._player.open_sessions(len(sessions))
                close_sessions(finished)  # after the next have been opened: see Player.play
        finally:
            close_sessions(sessions)

    def _take_resumed(self, slot: int) -> Group | None:
        """The group that the run had finished before; not one of weights that were lost with its process."""
        group = self._resumed.pop(slot, None)
        if group is not None and self._lost(group):
            self.record_drop(self.queue.step + 1, group, STALE)
            self.queue.replace(slot, STALE)
            return None
        return group

    def _lost(self, group: Group) -> bool:
        """Whether weights that this run went on without have sampled some of a group."""
        return newest_version(group) > self._parts.context.start_step // self._config.update_every

    async def _play_group(self, slot: int, attempt: int, sessions: list[Session]) -> Group:
        aborts = self._aborts[slot]
        again = ("again", aborts) if aborts else ()
        group_id = f"{slot}" + (f"a{aborts}" if aborts else "") + (f"r{attempt}" if attempt else "")
        task, seed = self._parts.tasks.task(slot, attempt), self._parts.context.config.seed
        episodes = [
            Episode(id=f"{group_id}-{index}", task=task, seed=derive_seed(seed, "sample", slot, attempt, index, *again))
            for index in range(self._config.group_size)
        ]
        ended = partial(self._on_episode, self.step_of(slot), False)
        trajectories = await self._player.play(episodes, sessions, on_end=ended)
        if (playing := asyncio.current_task()) is not None and playing.cancelling():
            raise asyncio.CancelledError  # somebody's code has swallowed it; the slot may be another's by now
        await self._adapt(trajectories)
        return Group(group_id=group_id, slot=slot, attempt=attempt, trajectories=tuple(trajectories))

    async def _adapt(self, trajectories: Sequence[Trajectory]) -> None:
        """Let no more groups be in flight than the sampler has memory for, when they are as long as those of late."""
        capacity = self._parts.sampler.capacity
        if capacity is None:
            return
        mean = sum(map(context_length, trajectories)) / len(trajectories)
        self._mean_context = mean if self._mean_context is None else 0.9 * self._mean_context + 0.1 * mean
        await self.queue.limit(int(capacity / (self._config.group_size * max(1.0, self._mean_context))))

    def _drop_reason(self, group: Group) -> str | None:
        try:
            return drop_reason(group, self._parts.algorithms[group.mixture])
        except BaseException:  # the user's filter; the group is finished, and in no other hands yet
            self._writer.add_group(self.step_of(group.slot), group, kind="queued")
            raise

    def _abort(self, slot: int, group: Group | None, empty: bool) -> None:
        """A step has enough without this slot: its episodes are cancelled, and played again later."""
        self._aborts[slot] += 1
        self.kept.forget(slot)
        step = self.queue.step + 1
        if group is not None:
            self._writer.add_group(step, group, kind=LATE)
        self._dropped[step][LATE] += not empty
        if (playing := self._playing.get(slot)) and not playing.done():
            playing.cancel()
            self._aborted.add(playing)

    def _ended(self, slot: int, playing: asyncio.Task[None]) -> None:
        self.meter.group_ends()
        self.count()
        self._aborted.discard(playing)
        if self._playing.get(slot) is playing:
            del self._playing[slot]


def context_length(trajectory: Trajectory) -> int:
    """Tokens that a sampler holds for an episode at its end."""
    length = 0
    for turn in trajectory.turns:
        length = (0 if turn.new_segment else length) + len(turn.context_ids) + len(turn.completion.token_ids)
    return length
