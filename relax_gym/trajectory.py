"""Episode → training samples with loss mask. Pure functions of what was really fed and sampled."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from relax_gym.types import Placed, TrainingSample, Trajectory, Turn


def to_samples(trajectory: Trajectory, group_id: str) -> list[TrainingSample]:
    """One sample for each segment; every sampled token is trainable in exactly one of them. Advantages are 0.

    A segment is a run of turns whose prompts extend each other token by token.
    """
    return [
        _sample(trajectory, group_id, number, segment) for number, segment in enumerate(_segments(trajectory.turns))
    ]


def with_advantage(
    sample: TrainingSample, advantage: float | NDArray[np.float64], *, dtype: type[np.floating] = np.float32
) -> TrainingSample:
    """The sample with one advantage for all its trained tokens, or with one for each, [trained_tokens]."""
    advantages = np.zeros(len(sample.token_ids), dtype=dtype)
    advantages[sample.loss_mask == 1] = advantage
    return dataclasses.replace(sample, advantages=advantages)


def _segments(turns: Sequence[Turn]) -> Iterator[list[Turn]]:
    segment: list[Turn] = []
    for turn in turns:
        if turn.new_segment and segment:
            yield segment
            segment = []
        segment.append(turn)
    if segment:
        yield segment


def _sample(trajectory: Trajectory, group_id: str, number: int, turns: Sequence[Turn]) -> TrainingSample:
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    spans: list[tuple[int, int]] = []
    media: list[Placed] = []
    for turn in turns:
        media += [placed.moved(len(ids)) for placed in turn.media]
        context, said = len(turn.context_ids), turn.completion
        ids += [*turn.context_ids, *said.token_ids]
        mask += [0] * context + [1] * len(said.token_ids)
        logprobs += [0.0] * context + list(said.logprobs)
        versions += [-1] * context + list(said.versions)
        spans.append((len(ids) - len(said.token_ids), len(ids)))
    return TrainingSample(
        episode_id=trajectory.episode_id,
        group_id=group_id,
        env_id=trajectory.task.env_id,
        segment=number,
        token_ids=np.array(ids, dtype=np.int32),
        loss_mask=np.array(mask, dtype=np.int8),
        logprobs=np.array(logprobs, dtype=np.float32),
        versions=np.array(versions, dtype=np.int32),
        advantages=np.zeros(len(ids), dtype=np.float32),
        turn_spans=tuple(spans),
        turn_rewards=tuple(turn.reward or 0.0 for turn in turns),
        reward=trajectory.reward,
        stop_reason=trajectory.stop_reason,
        mixture=trajectory.task.mixture,
        routed_experts=_join_experts(turns),
        media=tuple(media),
    )


def _join_experts(turns: Sequence[Turn]) -> NDArray[np.int32] | None:
    """Experts of each token of a segment as they were chosen when the token was first computed, but the last's."""
    parts = [turn.completion.routed_experts for turn in turns]
    given = [part for part in parts if part is not None]
    if not given:
        return None
    if len(given) != len(parts):
        raise ValueError("some turns of a segment have routed experts and some have none; a sampler gives all or none")
    known, tokens, pieces = 0, 0, []
    for turn, part in zip(turns, given, strict=True):
        tokens += len(turn.context_ids) + len(turn.completion.token_ids)
        if len(part) != tokens - 1:
            raise ValueError(
                f"routed_experts has {len(part)} rows for {tokens} tokens of prompt and completion; a sampler gives "
                "one row for each but the last, which is never routed"
            )
        pieces.append(part[known:])
        known = len(part)
    return np.concatenate(pieces).astype(np.int32)
