"""Samples → rows that hold a shared prompt once → padded micro-batches. Pure integer arrays, no model.

Samples whose ids before the first trained token are equal (the episodes of a group: one prompt, many answers) become
one row, a tree one level deep:

    ids        p p p p | a a a | b b          prompt, rest of sample a, rest of sample b
    positions  0 1 2 3 | 4 5 6 | 4 5          each rest goes on where the prompt ended
    segments   0 0 0 0 | 1 1 1 | 2 2          a token sees segment 0 and its own, never a later token

Nothing after the last token that predicts a trained one is computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from relax_gym.errors import TrainingError
from relax_gym.media.items import Media
from relax_gym.processing import MediaProcessor
from relax_gym.types import TrainingSample

IntArray = NDArray[np.int64]
PAD_SEGMENT = -1
UNROUTED = -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """One tree. `ids`, `positions`, `segments` have shape [L]; `members` are indices of the samples packed.

    `predictors` [N] are the indices in the row whose hidden states predict the trained tokens, members in order.
    """

    members: tuple[int, ...]
    ids: IntArray
    positions: IntArray
    segments: IntArray
    predictors: IntArray

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """What one forward pass takes: rows padded on the right to one length L.

    `ids`, `positions`, `segments` [R, L]; pads have segment -1. For the N trained tokens of S whole samples:
    `predictors` index the flattened [R·L] hidden states, `targets` are the token ids, `sample` in [0, S) says whose
    they are, `logprobs` and `advantages` come from the samples. `token_counts` is [S], `real_tokens` counts no pads.
    `row_sizes` [R] are how many of the members each row has; one that answers with one token has no segment of its own.
    `media` are in the order of their placeholders in the flattened ids; those of a shared prompt are there once.
    """

    ids: IntArray
    positions: IntArray
    segments: IntArray
    predictors: IntArray
    targets: IntArray
    sample: IntArray
    logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]
    token_counts: IntArray
    real_tokens: int
    members: tuple[TrainingSample, ...]
    row_sizes: tuple[int, ...]
    experts: NDArray[np.int32] | None
    media: tuple[Media, ...] = ()

    @property
    def branches(self) -> bool:
        """Whether some row holds more than one sample, so that a causal mask alone would be wrong."""
        return bool(self.segments.max() > 1)

    @property
    def padded_tokens(self) -> int:
        """Tokens the forward pass computes, pads included."""
        return self.ids.size


def pack(
    samples: Sequence[TrainingSample], *, budget: int, share_prefix: bool, pair_cost: float = 0.0
) -> list[MicroBatch]:
    """Cut samples into micro-batches of at most `budget` padded tokens; a sample longer than that is alone in one.

    `pair_cost` is what one pair of tokens in a row's attention costs, in units of what one token costs elsewhere: a
    tree computes the prompt once but attends over all its answers, so its best size lies in between. Samples without a
    trained token are left out. The result depends on nothing but the arguments.

    Raises:
        TrainingError: a sample trains its first token, which no token predicts.
    """
    rows = build_rows(samples, budget=budget, share_prefix=share_prefix, pair_cost=pair_cost)
    rows.sort(key=len, reverse=True)
    return [_collate(samples, part) for part in _fill(rows, budget)]


def build_rows(
    samples: Sequence[TrainingSample], *, budget: int, share_prefix: bool, pair_cost: float = 0.0
) -> list[Row]:
    """One or more rows for each prompt (see `pack`), none longer than `budget`; unshared, one for each sample."""
    trees: dict[object, list[int]] = {}
    prompts: list[int] = []
    for index, sample in enumerate(samples):
        trained = trained_positions(sample)
        prompts.append(int(trained[0]) if len(trained) else 0)
        if not len(trained):
            continue
        shown = tuple(placed.media for placed in sample.media if placed.end <= prompts[index])
        key = (sample.token_ids[: prompts[index]].tobytes(), shown) if share_prefix else index
        trees.setdefault(key, []).append(index)
    return [
        _row(samples, part, prompts[part[0]])
        for members in trees.values()
        for part in _split(samples, members, prompts[members[0]], budget, pair_cost)
    ]


def trained_positions(sample: TrainingSample) -> IntArray:
    """Where its trained tokens are. Raises TrainingError when the first token of all is one."""
    positions: IntArray = np.flatnonzero(sample.loss_mask)
    if len(positions) and not positions[0]:
        raise TrainingError(
            f"sample {sample.episode_id!r} (segment {sample.segment}) trains its first token, which nothing "
            "predicts; a prompt needs at least one token before the first sampled one"
        )
    return positions


def _input_length(sample: TrainingSample) -> int:
    """Tokens the model must read: all before the last trained one."""
    return int(np.flatnonzero(sample.loss_mask)[-1])


def _split(
    samples: Sequence[TrainingSample], members: list[int], prompt: int, budget: int, pair_cost: float
) -> Iterator[list[int]]:
    rests = [_input_length(samples[index]) - prompt for index in members]
    size = _tree_size(prompt, sum(rests) / len(rests), len(rests), pair_cost)
    part: list[int] = []
    length = prompt
    for index, rest in zip(members, rests, strict=True):
        if part and (len(part) == size or length + rest > budget):
            yield part
            part, length = [], prompt
        part.append(index)
        length += rest
    yield part


def _tree_size(prompt: int, rest: float, count: int, pair_cost: float) -> int:
    """How many of `count` answers of about `rest` tokens cost least when they share a row with their prompt."""

    def cost(size: int) -> float:
        length = prompt + size * rest
        return math.ceil(count / size) * length * (1 + pair_cost * length)

    return min(range(count, 0, -1), key=cost)


def _row(samples: Sequence[TrainingSample], members: Sequence[int], prompt: int) -> Row:
    ids = [samples[members[0]].token_ids[:prompt].astype(np.int64)]
    positions, segments = [np.arange(prompt)], [np.zeros(prompt, dtype=np.int64)]
    predictors = []
    start = prompt
    for segment, index in enumerate(members, start=1):
        end = _input_length(samples[index])
        ids.append(samples[index].token_ids[prompt:end].astype(np.int64))
        positions.append(np.arange(prompt, end))
        segments.append(np.full(end - prompt, segment))
        before = np.flatnonzero(samples[index].loss_mask) - 1
        predictors.append(np.where(before < prompt, before, before - prompt + start))
        start += end - prompt
    return Row(
        members=tuple(members),
        ids=np.concatenate(ids),
        positions=np.concatenate(positions),
        segments=np.concatenate(segments),
        predictors=np.concatenate(predictors),
    )


def _fill(rows: Sequence[Row], budget: int) -> Iterator[list[Row]]:
    """Cut rows, longest first, into batches whose padded size fits the budget."""
    part: list[Row] = []
    for row in rows:
        if part and (len(part) + 1) * len(part[0]) > budget:
            yield part
            part = []
        part.append(row)
    if part:
        yield part


def _collate(samples: Sequence[TrainingSample], rows: Sequence[Row]) -> MicroBatch:
    width = len(rows[0])
    members = [samples[index] for row in rows for index in row.members]
    trained = [member.loss_mask.astype(bool) for member in members]
    counts = np.array([mask.sum() for mask in trained], dtype=np.int64)
    return MicroBatch(
        ids=_pad([row.ids for row in rows], width, 0),
        positions=_pad([row.positions for row in rows], width, 0),
        segments=_pad([row.segments for row in rows], width, PAD_SEGMENT),
        predictors=np.concatenate([row.predictors + number * width for number, row in enumerate(rows)]),
        targets=np.concatenate([m.token_ids[mask] for m, mask in zip(members, trained, strict=True)]).astype(np.int64),
        sample=np.repeat(np.arange(len(members)), counts),
        logprobs=np.concatenate([m.logprobs[mask] for m, mask in zip(members, trained, strict=True)]),
        advantages=np.concatenate([m.advantages[mask] for m, mask in zip(members, trained, strict=True)]),
        token_counts=counts,
        real_tokens=sum(len(row) for row in rows),
        members=tuple(members),
        row_sizes=tuple(len(row.members) for row in rows),
        experts=_collate_experts(samples, rows, width),
        media=tuple(item for row in rows for item in _media(samples, row)),
    )


def _media(samples: Sequence[TrainingSample], row: Row) -> Iterator[Media]:
    """The items of a row: those of the prompt, then those of each member up to the last token that is read."""
    prompt = int((row.segments == 0).sum())
    for place, index in enumerate(row.members):
        end = _input_length(samples[index])
        for placed in samples[index].media:
            if placed.end <= end and (place == 0 or placed.start >= prompt):
                yield placed.media


def check_placeholders(processor: MediaProcessor, ids: IntArray, media: Sequence[Media]) -> None:
    """Raises TrainingError where the ids have placeholders without their items, or the other way round."""
    present = int(np.isin(ids, processor.placeholder_ids).sum())
    needed = sum(processor.outline(item).placeholders for item in media)
    if present != needed:
        raise TrainingError(
            f"samples have {present} image, video and audio tokens, but their media stand for {needed}; a sampler "
            "must not sample such tokens, and media must travel with the ids"
        )


def _collate_experts(samples: Sequence[TrainingSample], rows: Sequence[Row], width: int) -> NDArray[np.int32] | None:
    """Experts where the tokens are; those of a shared prompt are its first sample's."""
    shapes = {
        given.shape[1:] for row in rows for index in row.members if (given := samples[index].routed_experts) is not None
    }
    if not shapes:
        return None
    if len(shapes) > 1:
        raise TrainingError(f"routed experts have different [layers, top_k]: {sorted(shapes)}; use one sampler's")
    out = np.full((len(rows), width, *shapes.pop()), UNROUTED, dtype=np.int32)
    for line, row in zip(out, rows, strict=True):
        for segment, index in enumerate(row.members, start=1):
            given = samples[index].routed_experts
            if given is None:
                continue
            here = row.segments == segment
            if segment == 1:
                here |= row.segments == 0
            line[: len(row)][here] = given[row.positions[here]]
    return out


def _pad(arrays: Sequence[IntArray], width: int, value: int) -> IntArray:
    out = np.full((len(arrays), width), value, dtype=np.int64)
    for row, array in zip(out, arrays, strict=True):
        row[: len(array)] = array
    return out
