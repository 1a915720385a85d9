"""What the engine knows of each episode, and which row of the cache belongs to whom."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_gym.sampler import SamplingParams
from relax_gym.types import Completion, Placed
from relax_gym_plugins.samplers.local.cache import SlotCache

Ids = NDArray[np.int64]
Positions = NDArray[np.number[Any]]
WORTH_WAITING = 16


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One completion in the making."""

    prompt: Ids
    media: Sequence[Placed]
    params: SamplingParams
    limit: int
    arrival: int
    future: Future[Completion]
    seed: int = 0
    counted: bool = False
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


@dataclass(slots=True, kw_only=True, eq=False)
class Context:
    """The ids of one episode so far. Keys and values of the first `cached` of `length` ids are in row `row`.

    `names` are the ids, but where an image, video or audio clip stands they name what it holds: contexts may share keys
    and values as far as their names are equal. `positions` [axes, prompt] are set where they are not 0, 1, 2, …
    """

    order: int
    ids: Ids = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    names: Ids = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    length: int = 0
    cached: int = 0
    media: Sequence[Placed] = ()
    positions: Positions | None = None
    row: int | None = None
    request: Request | None = None
    turns: int = 0
    touched: int = 0

    @property
    def missing(self) -> int:
        """How many ids still have to go through the model."""
        return self.length - self.cached

    def begin(self, request: Request, positions: Positions | None = None) -> None:
        """Take a new prompt, keeping what is cached of it. Its last id is always computed: its logits are needed."""
        prompt, names = request.prompt, request.prompt.copy()
        for placed in request.media:
            names[placed.start : placed.end] = -1 - int(placed.media.digest[:15], 16)
        shared = common_prefix(names, self.names[: self.cached])
        self.media, self.positions = request.media, positions
        self.cached = self.before_media(min(shared, len(prompt) - 1))
        self.ids, self.names = (np.concatenate([of, np.empty(request.limit, dtype=np.int64)]) for of in (prompt, names))
        self.length = len(prompt)
        self.request = request
        self.turns += 1

    def append(self, token: int) -> None:
        """Add a sampled id."""
        self.ids[self.length] = self.names[self.length] = token
        self.length += 1

    def before_media(self, end: int) -> int:
        """`end`, or where the item that it would cut begins: an item goes through the model in one piece."""
        return next((placed.start for placed in self.media if placed.start < end < placed.end), end)

    def piece(self, size: int) -> int:
        """About `size` of the missing ids, such that no item is cut."""
        end = self.cached + min(size, self.missing)
        cut = next((placed for placed in self.media if placed.start < end < placed.end), None)
        if cut is not None:
            end = cut.start if cut.start > self.cached else cut.end
        return end - self.cached

    def media_in(self, start: int, end: int) -> list[Placed]:
        """The items among the ids [start, end)."""
        return [placed for placed in self.media if start <= placed.start and placed.end <= end]

    def positions_of(self, start: int, end: int) -> Positions:
        """Position ids of the ids [start, end), [axes, end - start]; text goes on where the prompt ended."""
        if self.positions is None:
            return np.arange(start, end)[None]
        known = self.positions.shape[1]
        after = np.arange(max(start, known), end) - known + self.positions.max() + 1
        return np.concatenate([self.positions[:, start:end], np.tile(after, (len(self.positions), 1))], axis=1)


def common_prefix(first: Ids, second: Ids) -> int:
    """How many leading ids are equal."""
    size = min(len(first), len(second))
    different = np.flatnonzero(first[:size] != second[:size])
    return int(different[0]) if different.size else size


class Rows:
    """Hands rows of the cache to contexts, keeps the busy ones contiguous, and shares common prefixes."""

    def __init__(self, cache: SlotCache, max_rows: int) -> None:
        self.cache, self.max_rows = cache, max_rows
        self.owners: list[Context | None] = []

    def admit(self, waiting: Iterable[Context]) -> None:
        """Give a row to each waiting context, in order, for as long as there are free or idle ones."""
        for context in waiting:
            row = self._free_row()
            if row is None:
                return
            self.owners[row], context.row, context.cached = context, row, 0
            self.cache.reserve(len(self.owners), self.cache.length)

    def _free_row(self) -> int | None:
        if None in self.owners:
            return self.owners.index(None)
        if len(self.owners) < self.max_rows:
            self.owners.append(None)
            return len(self.owners) - 1
        idle = [owner for owner in self.owners if owner is not None and owner.request is None]
        if not idle:
            return None
        row = min(idle, key=lambda owner: (owner.touched, owner.order)).row
        assert row is not None
        self.release(row)
        return row

    def release(self, row: int) -> None:
        """Take a row from its owner."""
        owner = self.owners[row]
        assert owner is not None
        owner.row, owner.cached = None, 0
        self.owners[row] = None

    def share(self, context: Context) -> None:
        """Copy the longest prefix of a context that another row already has, if that is more than its own."""
        assert context.row is not None
        best, source = context.cached, None
        for owner in self.owners:
            if owner is None or owner is context or owner.cached <= best or owner.names[best] != context.names[best]:
                continue
            shared = common_prefix(context.names[: context.length - 1], owner.names[: owner.cached])
            shared = context.before_media(shared)
            if shared > best:
                best, source = shared, owner.row
        if source is not None:
            self.cache.copy(source, context.row, context.cached, best)
            context.cached = best

    def prefill_batch(self, active: Iterable[Context], budget: int) -> list[tuple[Context, int]]:
        """Which contexts to prefill now and how many ids of each: one padded block of at most `budget` ids.

        A context whose prefix another one is about to compute is left out; it copies it afterwards.
        """
        leaders: list[Context] = []
        for context in active:
            if context.missing > 1:
                self.share(context)
            if context.missing > 1 and not any(_worth_waiting(context, leader) for leader in leaders):
                leaders.append(context)
        leaders.sort(key=lambda context: (-context.missing, context.order))
        if not leaders:
            return []
        longest = leaders[0].piece(budget)
        chosen = leaders[: max(1, budget // longest)]
        return [(context, context.piece(longest)) for context in chosen]

    def compact(self, active: Sequence[Context]) -> list[Context]:
        """Move contexts so that the active ones own exactly the first rows; returns them in row order."""
        size = len(active)
        movers = [context for context in active if context.row is not None and context.row >= size]
        busy = set(map(id, active))
        holes = [row for row in range(size) if id(self.owners[row]) not in busy]
        for hole, context in zip(holes, movers, strict=True):
            self._exchange(hole, context)
        return [owner for owner in self.owners[:size] if owner is not None]

    def _exchange(self, row: int, context: Context) -> None:
        idle, old = self.owners[row], context.row
        assert old is not None
        if idle is None or not idle.cached:
            self.cache.copy(old, row, 0, context.cached)
        else:
            self.cache.swap(old, row, max(context.cached, idle.cached))
        if idle is not None:
            idle.row = old
        self.owners[row], self.owners[old], context.row = context, idle, row


def _worth_waiting(context: Context, leader: Context) -> bool:
    gain = common_prefix(context.names[: context.length - 1], leader.names[: leader.length]) - context.cached
    return gain >= min(WORTH_WAITING, context.missing - 1)
