"""Golden integers: samples in, rows and micro-batches out."""

import dataclasses

import numpy as np
import pytest
import torch
from learner_cases import random_batch, sample

from relax_gym.errors import TrainingError
from relax_gym.media import Image
from relax_gym.types import Placed, TrainingSample
from relax_gym_trainers.torch_learner.packing import build_rows, pack
from relax_gym_trainers.torch_learner.policy import tree_mask

A = sample([5, 6, 7, 10, 11, 12], [0, 0, 0, 1, 1, 1], advantage=1.0, logprobs=[0, 0, 0, -1, -2, -3])
B = sample([5, 6, 7, 20, 30, 21, 1], [0, 0, 0, 1, 0, 1, 0], advantage=-1.0, logprobs=[0, 0, 0, -4, 0, -5, 0])
C = sample([5, 6, 40], [0, 0, 1], advantage=0.5, logprobs=[0, 0, -6])


def test_one_prompt_is_held_once():
    (row,) = build_rows([A, B], budget=100, share_prefix=True)
    assert row.members == (0, 1)
    assert row.ids.tolist() == [5, 6, 7, 10, 11, 20, 30]
    assert row.positions.tolist() == [0, 1, 2, 3, 4, 3, 4]
    assert row.segments.tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert row.predictors.tolist() == [2, 3, 4, 2, 6]


def test_nothing_is_shared_across_prompts_or_when_turned_off():
    assert [row.members for row in build_rows([A, C, B], budget=100, share_prefix=True)] == [(0, 2), (1,)]
    rows = build_rows([A, B], budget=100, share_prefix=False)
    assert [row.ids.tolist() for row in rows] == [[5, 6, 7, 10, 11], [5, 6, 7, 20, 30]]
    assert [row.predictors.tolist() for row in rows] == [[2, 3, 4], [2, 4]]


def test_a_row_is_split_where_it_would_exceed_the_budget():
    assert [row.members for row in build_rows([A, B, A], budget=7, share_prefix=True)] == [(0, 1), (2,)]
    assert [row.members for row in build_rows([A, B, A], budget=6, share_prefix=True)] == [(0,), (1,), (2,)]
    assert [row.members for row in build_rows([A], budget=1, share_prefix=True)] == [(0,)]


def test_a_micro_batch_is_padded_on_the_right_with_the_longest_row_first():
    (batch,) = pack([C, A, B], budget=100, share_prefix=True)
    assert batch.ids.tolist() == [[5, 6, 7, 10, 11, 20, 30], [5, 6, 0, 0, 0, 0, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 3, 4], [0, 1, 0, 0, 0, 0, 0]]
    assert batch.segments.tolist() == [[0, 0, 0, 1, 1, 2, 2], [0, 0, -1, -1, -1, -1, -1]]
    assert batch.predictors.tolist() == [2, 3, 4, 2, 6, 8]
    assert batch.targets.tolist() == [10, 11, 12, 20, 21, 40]
    assert batch.sample.tolist() == [0, 0, 0, 1, 1, 2]
    assert batch.logprobs.tolist() == [-1, -2, -3, -4, -5, -6]
    assert batch.advantages.tolist() == [1, 1, 1, -1, -1, 0.5]
    assert batch.token_counts.tolist() == [3, 2, 1]
    assert (batch.real_tokens, batch.padded_tokens, batch.branches) == (9, 14, True)


def test_micro_batches_keep_to_the_padded_budget():
    batches = pack(random_batch(groups=4, size=3).samples, budget=30, share_prefix=False)
    shapes = [batch.ids.shape for batch in batches]
    assert shapes == [(1, 22), (1, 19), (1, 18), (1, 16), (2, 15), (2, 14), (2, 13), (2, 10)]
    assert not any(batch.branches for batch in batches)


def test_every_trained_token_is_in_exactly_one_micro_batch():
    samples = random_batch(groups=3, size=4).samples
    for budget in (1, 20, 40, 1000):
        for share in (False, True):
            batches = pack(samples, budget=budget, share_prefix=share)
            got = sorted(value for batch in batches for value in batch.logprobs.tolist())
            assert got == sorted(float(v) for s in samples for v in s.logprobs[s.loss_mask == 1])


def test_samples_without_trained_tokens_are_left_out():
    empty = sample([5, 6], [0, 0])
    assert pack([empty], budget=10, share_prefix=True) == []
    (batch,) = pack([empty, C], budget=10, share_prefix=True)
    assert batch.token_counts.tolist() == [1]


def test_a_sample_that_trains_its_first_token_is_refused():
    with pytest.raises(TrainingError, match=r"'e0' \(segment 0\) trains its first token"):
        pack([sample([5, 6], [1, 1])], budget=10, share_prefix=True)


def test_nothing_but_prompt_and_answer_of_ones_own_is_seen():
    mask = tree_mask(torch.tensor([[0, 0, 1, 1, 2, -1]]))
    assert mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 1, 0, 0, 0, 1],
    ]


def test_packing_does_not_change_its_input():
    before = [(s.token_ids.copy(), s.loss_mask.copy()) for s in (A, B, C)]
    pack([A, B, C], budget=10, share_prefix=True)
    for s, (ids, mask) in zip((A, B, C), before, strict=True):
        assert np.array_equal(s.token_ids, ids)
        assert np.array_equal(s.loss_mask, mask)


def test_the_size_of_a_tree_weighs_the_prompt_against_attention():
    samples = [sample([5, 6, 7, 10 + i, 30 + i, 1], [0, 0, 0, 1, 1, 1], advantage=1.0) for i in range(8)]

    def members(pair_cost: float) -> list[int]:
        return [len(row.members) for row in build_rows(samples, budget=100, share_prefix=True, pair_cost=pair_cost)]

    assert members(0.0) == [8]
    assert members(0.05) == [4, 4]
    assert members(1.0) == [2] * 4


def image(shade: int) -> Image:
    return Image(pixels=np.full((2, 2, 3), shade, dtype=np.uint8))


def with_media(plain: TrainingSample, *placed: tuple[Image, int, int]) -> TrainingSample:
    items = tuple(Placed(media=media, start=start, end=end) for media, start, end in placed)
    return dataclasses.replace(plain, media=items)


RED, BLUE, LATER = image(1), image(2), image(3)


def test_k57_media_of_a_shared_prompt_are_held_once_and_those_of_later_turns_follow() -> None:
    first = with_media(A, (RED, 1, 2))
    second = with_media(B, (RED, 1, 2), (LATER, 4, 5))
    (batch,) = pack([first, second], budget=100, share_prefix=True)
    assert batch.media == (RED, LATER)
    apart = pack([first, second], budget=100, share_prefix=False)
    assert [item for batch in apart for item in batch.media] == [RED, RED, LATER]


def test_equal_ids_with_different_images_share_nothing() -> None:
    rows = build_rows([with_media(A, (RED, 1, 2)), with_media(B, (BLUE, 1, 2))], budget=100, share_prefix=True)
    assert [row.members for row in rows] == [(0,), (1,)]
    (both,) = build_rows([with_media(A, (RED, 1, 2)), with_media(B, (image(1), 1, 2))], budget=100, share_prefix=True)
    assert both.members == (0, 1)


def test_media_after_the_last_trained_token_are_not_computed() -> None:
    (batch,) = pack([with_media(B, (RED, 0, 2), (LATER, 6, 7))], budget=100, share_prefix=True)
    assert batch.media == (RED,)


def test_k48_a_batch_may_begin_with_a_sample_without_media() -> None:
    (batch,) = pack([C, with_media(A, (RED, 1, 2))], budget=100, share_prefix=True)
    assert batch.media == (RED,)
