"""Samples of one update → for each data-parallel rank the same number of packed micro-batches. No model, no torch.

A micro-batch is one row of whole samples, one after another, each with pads up to a multiple of `align` (what context
and sequence parallelism can cut into equal shares) and without the tokens after its last predictor:

    ids         a a a a a . b b b .        align 2
    positions   0 1 2 3 4 5 0 1 2 3        as if the pads went on
    cu_seqlens  0           6       10

All ranks compute the same plan and collate only their own share of it. Where a rank has fewer micro-batches than
another it gets empty ones, which train nothing: every rank must enter every collective.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_gym.errors import TrainingError
from relax_gym.media.items import Media
from relax_gym.types import TrainingSample
from relax_gym_trainers.torch_learner.packing import UNROUTED, IntArray, trained_positions

Bin = list[int]
"""Numbers of the samples of one micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedBatch:
    """What one forward pass takes: T tokens in S sequences that do not see one another.

    `ids`, `positions` [T], or [3, T] of several axes; pads have id 0. `cu_seqlens` [S + 1] int32 are the ends of the
    padded sequences, and `max_length` is the longest's. For the N trained tokens of the S samples: `predictors` index
    the T hidden states, `targets` are the token ids, `sample` in [0, S) says whose they are, `logprobs` and
    `advantages` come from the samples. `token_counts` is [S], `real_tokens` counts no pads. `experts` [T, layers,
    top_k] are `UNROUTED` where unknown; if any sample of the update has them, all its micro-batches do. `media` are in
    the order of their placeholders.

    An empty micro-batch is one sequence of pads with `members` (), N = 0 and arrays [0] where others have S entries.
    """

    ids: IntArray
    positions: IntArray
    cu_seqlens: NDArray[np.int32]
    max_length: int
    predictors: IntArray
    targets: IntArray
    sample: IntArray
    logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]
    token_counts: IntArray
    real_tokens: int
    members: tuple[TrainingSample, ...]
    experts: NDArray[np.int32] | None
    media: tuple[Media, ...] = ()

    @property
    def padded_tokens(self) -> int:
        """Tokens the forward pass computes, pads included."""
        return self.ids.size


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """The tokens of a sample that the model must read, and which of them predict a trained one."""

    ids: NDArray[np.int32]
    predictors: IntArray

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """Who computes what of one update. The totals are those of all its samples, the skipped ones included.

    `shares` has for each data-parallel rank the same number of micro-batches, as indices into `used` and `rows`, which
    are the tokens of those samples.
    """

    used: tuple[TrainingSample, ...]
    rows: tuple[Row, ...]
    shares: tuple[tuple[tuple[int, ...], ...], ...]
    align: int
    total_tokens: int
    total_samples: int

    @property
    def padded_tokens(self) -> int:
        """Tokens that all ranks together compute, pads included."""
        lengths = [_padded(len(row), self.align) for row in self.rows]
        return sum(sum(lengths[i] for i in members) or self.align for share in self.shares for members in share)

    def micro_batches(self, rank: int) -> list[PackedBatch]:
        """The share of a data-parallel rank, largest first, the empty ones last."""
        shape = _expert_shape(self.used)
        return [
            _collate([self.used[i] for i in members], [self.rows[i] for i in members], self.align, shape)
            for members in self.shares[rank]
        ]


def plan(
    samples: Sequence[TrainingSample],
    *,
    ranks: int,
    budget: int,
    align: int = 1,
    skip_flat: bool = False,
    pair_cost: float = 0.0,
    multiple: int = 1,
    apart: Callable[[TrainingSample], object] | None = None,
) -> Plan:
    """Share samples out so that all ranks have as much to compute; see `Plan`.

    A micro-batch has at most `budget` tokens, pads included; a sample longer than that is alone in one. There are as
    few as that takes, and they cost about the same: a sequence of L tokens costs L · (1 + `pair_cost` · L). Their
    number for each rank is a multiple of `multiple` (an interleaved pipeline's stages). `skip_flat` leaves out samples
    all of whose advantages are 0: they change time, not the gradient. Samples of which `apart` says different things
    are never in one micro-batch. The result depends on nothing but the arguments.

    Raises:
        TrainingError: a sample trains its first token, which no token predicts, or none of the numbers allowed.
    """
    for name, value in (("ranks", ranks), ("budget", budget), ("align", align), ("multiple", multiple)):
        if value < 1:
            raise TrainingError(f"micro-batches cannot be planned with {name} = {value}; give a whole number from 1")
    trained = [sample for sample in samples if sample.trained_tokens]
    used = [s for s in trained if not skip_flat or s.advantages[s.loss_mask.astype(bool)].any()]
    rows = [_row(sample) for sample in used]
    kinds: dict[object, list[_Item]] = {}
    for index, (sample, row) in enumerate(zip(used, rows, strict=True)):
        length = _padded(len(row), align)
        item = _Item(index=index, length=length, cost=length * (1 + pair_cost * length))
        kinds.setdefault(apart(sample) if apart else None, []).append(item)
    groups = [sorted(items, key=lambda item: (-item.cost, item.index)) for items in kinds.values()]
    bins, count = _all_bins(groups, ranks=ranks, budget=budget, multiple=multiple)
    return Plan(
        used=tuple(used),
        rows=tuple(rows),
        shares=_share(bins, {item.index: item.cost for items in groups for item in items}, ranks, count),
        align=align,
        total_tokens=sum(sample.trained_tokens for sample in trained),
        total_samples=len(trained),
    )


@dataclass(frozen=True, slots=True)
class _Item:
    """A sample, its padded length and what it costs to compute."""

    index: int
    length: int
    cost: float


def _all_bins(groups: Sequence[Sequence[_Item]], *, ranks: int, budget: int, multiple: int) -> tuple[list[Bin], int]:
    """At most `ranks` · count micro-batches, and count: the fewest for each kind, then more where they cost most."""
    found = [_fewest_bins(items, budget) for items in groups]
    sizes = [len(bins) for bins in found]
    costs = [sum(item.cost for item in items) for items in groups]
    count = math.ceil(sum(sizes) / (ranks * multiple)) * multiple
    for _ in range(ranks * count - sum(sizes)):
        splittable = [kind for kind, items in enumerate(groups) if sizes[kind] < len(items)]
        if not splittable:
            break
        sizes[max(splittable, key=lambda kind: costs[kind] / sizes[kind])] += 1
    bins = [_bins(items, size, budget) or fewest for items, size, fewest in zip(groups, sizes, found, strict=True)]
    return [members for kind in bins for members in kind], count


def _fewest_bins(items: Sequence[_Item], budget: int) -> list[Bin]:
    count = math.ceil(sum(min(item.length, budget) for item in items) / budget)
    while (bins := _bins(items, min(count, len(items)), budget)) is None:
        count += 1
    return bins


def _bins(items: Sequence[_Item], count: int, budget: int) -> list[Bin] | None:
    """Each item, the costliest first, into the cheapest of `count` micro-batches that has room; None when none has.

    An empty one has room for anything and is the cheapest, so that as many as there are items always do.
    """
    bins: list[Bin] = [[] for _ in range(count)]
    costs, lengths = np.zeros(count), np.zeros(count, dtype=np.int64)
    for item in items:
        room = (lengths == 0) | (lengths + item.length <= budget)
        if not room.any():
            return None
        place = int(np.where(room, costs, np.inf).argmin())
        bins[place].append(item.index)
        costs[place] += item.cost
        lengths[place] += item.length
    return bins


def _share(
    bins: Sequence[Bin], costs: dict[int, float], ranks: int, count: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Each micro-batch, the costliest first, to the rank that has least to do and fewer than `count`."""
    shares: list[list[tuple[int, ...]]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    cost_of = [sum(costs[index] for index in members) for members in bins]
    for number in sorted(range(len(bins)), key=lambda number: -cost_of[number]):
        rank = min((rank for rank in range(ranks) if len(shares[rank]) < count), key=loads.__getitem__)
        shares[rank].append(tuple(sorted(bins[number])))
        loads[rank] += cost_of[number]
    return tuple(tuple(share) + ((),) * (count - len(share)) for share in shares)


def _padded(length: int, align: int) -> int:
    return math.ceil(length / align) * align


def _row(sample: TrainingSample) -> Row:
    trained = trained_positions(sample)
    return Row(ids=sample.token_ids[: trained[-1]], predictors=trained - 1)


def _expert_shape(samples: Sequence[TrainingSample]) -> tuple[int, ...] | None:
    """[layers, top_k] of what the samples have, None if none has any."""
    shapes = {sample.routed_experts.shape[1:] for sample in samples if sample.routed_experts is not None}
    if len(shapes) > 1:
        raise TrainingError(f"routed experts have different [layers, top_k]: {sorted(shapes)}; use one sampler's")
    return shapes.pop() if shapes else None


def empty(align: int) -> PackedBatch:
    """A micro-batch without samples."""
    return _collate([], [], align, None)


def _collate(
    members: Sequence[TrainingSample], rows: Sequence[Row], align: int, expert_shape: tuple[int, ...] | None
) -> PackedBatch:
    masks = [member.loss_mask.astype(bool) for member in members]
    counts = np.array([mask.sum() for mask in masks], dtype=np.int64)
    lengths = [_padded(len(row), align) for row in rows] or [align]
    ends = np.cumsum([0, *lengths])
    ids = np.zeros(ends[-1], dtype=np.int64)
    experts = None
    if expert_shape is not None:
        experts = np.full((ends[-1], *expert_shape), UNROUTED, dtype=np.int32)
    for start, row, member in zip(ends, rows, members, strict=False):
        here = slice(start, start + len(row))
        ids[here] = row.ids
        if experts is not None and member.routed_experts is not None:
            experts[here] = member.routed_experts[: len(row)]
    return PackedBatch(
        ids=ids,
        positions=np.concatenate([np.arange(length) for length in lengths]),
        cu_seqlens=ends.astype(np.int32),
        max_length=max(lengths),
        predictors=_joined([start + row.predictors for start, row in zip(ends, rows, strict=False)], np.int64),
        targets=_joined([m.token_ids[mask] for m, mask in zip(members, masks, strict=True)], np.int64),
        sample=np.repeat(np.arange(len(members)), counts),
        logprobs=_joined([m.logprobs[mask] for m, mask in zip(members, masks, strict=True)], np.float32),
        advantages=_joined([m.advantages[mask] for m, mask in zip(members, masks, strict=True)], None),
        token_counts=counts,
        real_tokens=sum(map(len, rows)),
        members=tuple(members),
        experts=experts,
        media=tuple(p.media for row, m in zip(rows, members, strict=True) for p in m.media if p.end <= len(row)),
    )


def _joined(arrays: Sequence[NDArray[Any]], dtype: type | None) -> NDArray[Any]:
    return np.concatenate(arrays, dtype=dtype) if arrays else np.zeros(0, dtype=dtype or np.float32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ContextShare:
    """What one context-parallel rank computes of a micro-batch: T / cp tokens, of each sequence the same share.

    `tokens` [T / cp] are which of the T these are, `ids`, `positions` [.., T / cp] and `experts` [T / cp, layers,
    top_k] theirs, in the order of this rank's hidden states.
    `predictors` [n] are the local hidden states that predict trained tokens, `trained` [n] which of the batch's N these
    are: of all ranks together each one once, so that `whole[trained] = mine`, summed over the ranks, is all of [N].
    """

    tokens: IntArray
    ids: IntArray
    positions: IntArray
    experts: NDArray[np.int32] | None
    predictors: IntArray
    trained: IntArray


def split_for_context(batch: PackedBatch, cp: int, rank: int) -> ContextShare:
    """The share of context-parallel rank `rank` of `cp`; with one rank, the whole."""
    if cp == 1:
        return ContextShare(
            tokens=np.arange(batch.ids.size),
            ids=batch.ids,
            positions=batch.positions,
            experts=batch.experts,
            predictors=batch.predictors,
            trained=np.arange(len(batch.targets)),
        )
    mine = zigzag(batch.cu_seqlens, cp, rank)
    where = np.full(batch.ids.size, -1, dtype=np.int64)
    where[mine] = np.arange(len(mine))
    local = where[batch.predictors]
    return ContextShare(
        tokens=mine,
        ids=batch.ids[mine],
        positions=batch.positions[..., mine],
        experts=None if batch.experts is None else batch.experts[mine],
        predictors=local[local >= 0],
        trained=np.flatnonzero(local >= 0),
    )


def zigzag(cu_seqlens: NDArray[np.int32], cp: int, rank: int) -> IntArray:
    """Which of the T tokens a context-parallel rank has, [T / cp]: of the 2·cp equal pieces of each sequence the
    `rank`-th from the front and the `rank`-th from the back, so that causal attention costs all ranks the same.

    Raises:
        TrainingError: the length of a sequence is no multiple of 2·cp.
    """
    starts, lengths = cu_seqlens[:-1].astype(np.int64), np.diff(cu_seqlens.astype(np.int64))
    if cp == 1:
        return np.arange(cu_seqlens[-1])
    if np.mod(lengths, 2 * cp).any():
        raise TrainingError(f"sequences of {lengths.tolist()} tokens cannot be cut for cp = {cp}; align to {2 * cp}")
    pieces = []
    for start, size in zip(starts, lengths // (2 * cp), strict=True):
        for number in (rank, 2 * cp - 1 - rank):
            pieces.append(np.arange(start + number * size, start + (number + 1) * size))
    return np.concatenate(pieces)
