"""Keys and values of all contexts in preallocated pools that a Hugging Face model reads and writes as its cache."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

PAGE = 16
FIRST_ROWS = 8
FIRST_LENGTH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Plane:
    """Where one layer keeps its keys (or values): a pool and the index in it."""

    pool: int
    index: int


class ShapeProbe(Cache):
    """A cache that keeps nothing but the shapes of what each layer stores."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.shapes: dict[int, tuple[tuple[int, int], tuple[int, int]]] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """Note (heads, head size) of the layer's keys and of its values."""
        heads, size = key_states.shape[1], key_states.shape[3]
        self.shapes[layer_idx] = (heads, size), (value_states.shape[1], value_states.shape[3])
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Nothing is cached."""
        return 0


class SlotCache(Cache):
    """One row for each context. `plan_*` says where the next forward writes and what it reads.

    All layers with equal shapes share one pool `[planes, rows, length, heads, head size]`, so a row is moved with one
    copy, and a forward step of contiguous rows reads views. Pools are zeroed: masked garbage must stay finite.
    """

    def __init__(
        self,
        shapes: dict[int, tuple[tuple[int, int], tuple[int, int]]],
        *,
        max_rows: int,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(layers=[])
        self.max_rows, self.max_length = max_rows, max_length
        self.dtype, self.device = dtype, device
        counts: Counter[tuple[int, int]] = Counter()
        kinds: list[tuple[int, int]] = []
        self._planes: dict[int, tuple[Plane, Plane]] = {}
        for layer, pair in shapes.items():
            planes = []
            for shape in pair:
                if shape not in kinds:
                    kinds.append(shape)
                planes.append(Plane(pool=kinds.index(shape), index=counts[shape]))
                counts[shape] += 1
            self._planes[layer] = (planes[0], planes[1])
        self.rows, self.length = 0, 0
        self.pools = [self._allocate(counts[shape], 0, 0, shape) for shape in kinds]
        self._views: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}
        self._view_key: tuple[int, int] | None = None
        self._write_index: Tensor
        self._source: Tensor
        self._gather: Tensor | None = None
        self._span = 0

    def _allocate(self, planes: int, rows: int, length: int, shape: tuple[int, int]) -> Tensor:
        return torch.zeros(planes, rows, length, *shape, dtype=self.dtype, device=self.device)

    def reserve(self, rows: int, length: int) -> None:
        """Make room for `rows` contexts of `length` tokens, doubling what there is."""
        if rows <= self.rows and length <= self.length:
            return
        new_rows, new_length = self.rows, self.length
        if rows > self.rows:
            new_rows = min(max(rows, 2 * self.rows, FIRST_ROWS), max(rows, self.max_rows))
        if length > self.length:
            new_length = pages(min(max(length, 2 * self.length, FIRST_LENGTH), max(length, self.max_length)))
        for index, old in enumerate(self.pools):
            pool = self._allocate(old.shape[0], new_rows, new_length, (old.shape[3], old.shape[4]))
            pool[:, : self.rows, : self.length] = old
            self.pools[index] = pool
        self.rows, self.length = new_rows, new_length
        self._view_key = None

    def clear(self) -> None:
        """Forget every context."""
        for pool in self.pools:
            pool.zero_()

    def copy(self, source: int, target: int, start: int, stop: int) -> None:
        """Copy positions [start, stop) of one row to another."""
        for pool in self.pools:
            pool[:, target, start:stop] = pool[:, source, start:stop]

    def swap(self, first: int, second: int, length: int) -> None:
        """Exchange the first `length` positions of two rows."""
        for pool in self.pools:
            kept = pool[:, first, :length].clone()
            pool[:, first, :length] = pool[:, second, :length]
            pool[:, second, :length] = kept

    def plan_decode(self, positions: Tensor, span: int) -> None:
        """The next forward has one new token for each row of [0, n) at `positions` [n]; it reads `span` positions."""
        rows = positions.shape[0]
        self._gather = None
        self._write_index = torch.arange(rows, device=self.device) * self.length + positions
        if self._view_key == (rows, span):
            return
        self._view_key = (rows, span)
        for layer, (key, value) in self._planes.items():
            keys, values = self.pools[key.pool][key.index], self.pools[value.pool][value.index]
            self._views[layer] = (
                keys.view(self.rows * self.length, -1),
                values.view(self.rows * self.length, -1),
                keys[:rows, :span].transpose(1, 2),
                values[:rows, :span].transpose(1, 2),
            )

    def plan_prefill(self, rows: Tensor, write_index: Tensor, source: Tensor, span: int) -> None:
        """The next forward has a padded block of new tokens `[b, q]` for `rows` [b] and reads `span` positions.

        `source` are the flat indices into the block of the tokens that are not padding, `write_index` (of equal
        length) is `row * length + position` of each.
        """
        self._write_index, self._source, self._gather = write_index, source, rows
        self._span = span
        self._view_key = None

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """Store `[b, heads, q, size]`; return all that the planned rows may attend to, `[b, heads, span, size]`."""
        if self._gather is None:
            flat_keys, flat_values, keys, values = self._views[layer_idx]
            flat_keys.index_copy_(0, self._write_index, key_states.reshape(key_states.shape[0], -1))
            flat_values.index_copy_(0, self._write_index, value_states.reshape(value_states.shape[0], -1))
            return keys, values
        key, value = self._planes[layer_idx]
        return self._prefill(key, key_states, self._gather), self._prefill(value, value_states, self._gather)

    def _prefill(self, plane: Plane, states: Tensor, rows: Tensor) -> Tensor:
        store = self.pools[plane.pool][plane.index]
        batch, heads, length, size = states.shape
        new = states.transpose(1, 2).reshape(batch * length, heads * size)
        store.view(self.rows * self.length, -1).index_copy_(0, self._write_index, new.index_select(0, self._source))
        return store[:, : self._span].index_select(0, rows).transpose(1, 2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Models ask only to make masks and positions, which the engine gives them."""
        return 0


def pages(length: int) -> int:
    """Round up to whole pages, so that shapes (and the views made for them) change rarely."""
    return -(-length // PAGE) * PAGE
