"""Golden integers of packed micro-batches, and what holds for every way to share them out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_cases import random_batch, sample
from megatron_learner_kit import Case, Folders, on_ranks, rank_learner
from test_packing import BLUE, LATER, RED, A, B, C, with_media

from relax_gym.errors import TrainingError
from relax_gym.types import TrainingSample
from relax_gym_trainers.functional import token_weights
from relax_gym_trainers.megatron_learner.backend import pair_cost
from relax_gym_trainers.megatron_learner.batches import PackedBatch, Plan, plan, split_for_context, zigzag
from relax_gym_trainers.megatron_learner.parallel import Layout
from relax_gym_trainers.megatron_learner.rank_service import Place
from relax_gym_trainers.torch_learner import update
from relax_gym_trainers.torch_learner.packing import UNROUTED


def only(samples: Sequence[TrainingSample], align: int = 1) -> PackedBatch:
    (batch,) = plan(samples, ranks=1, budget=100, align=align).micro_batches(0)
    return batch


def every(made: Plan) -> list[PackedBatch]:
    return [batch for rank in range(len(made.shares)) for batch in made.micro_batches(rank)]


def routed(plain: TrainingSample, first: int) -> TrainingSample:
    """Its tokens chose experts first, first + 1, … in a model of one layer that takes one expert."""
    experts = np.arange(first, first + len(plain.token_ids) - 1, dtype=np.int32)
    return dataclasses.replace(plain, routed_experts=experts[:, None, None])


def test_k16_whole_samples_one_after_another_train_what_the_policy_sampled() -> None:
    batch = only([A, B, C])
    assert batch.ids.tolist() == [5, 6, 7, 10, 11, 5, 6, 7, 20, 30, 5, 6]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 5, 10, 12]
    assert batch.cu_seqlens.dtype == np.int32
    assert batch.predictors.tolist() == [2, 3, 4, 7, 9, 11]
    assert batch.targets.tolist() == [10, 11, 12, 20, 21, 40]
    assert batch.sample.tolist() == [0, 0, 0, 1, 1, 2]
    assert batch.logprobs.tolist() == [-1, -2, -3, -4, -5, -6]
    assert batch.advantages.tolist() == [1, 1, 1, -1, -1, 0.5]
    assert batch.token_counts.tolist() == [3, 2, 1]
    assert batch.members == (A, B, C)
    assert (batch.max_length, batch.real_tokens, batch.padded_tokens, batch.experts) == (5, 12, 12, None)


def test_k26_each_sequence_is_padded_on_its_right() -> None:
    batch = only([A, C, B], align=4)
    assert batch.ids.tolist() == [5, 6, 7, 10, 11, 0, 0, 0, 5, 6, 0, 0, 5, 6, 7, 20, 30, 0, 0, 0]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]
    assert batch.cu_seqlens.tolist() == [0, 8, 12, 20]
    assert batch.predictors.tolist() == [2, 3, 4, 9, 14, 16]
    assert batch.targets.tolist() == [10, 11, 12, 40, 20, 21]
    assert (batch.max_length, batch.real_tokens, batch.padded_tokens) == (8, 12, 20)


def test_samples_are_shared_out_by_what_they_cost() -> None:
    lengths = [9, 7, 6, 5, 3, 2, 2, 2]
    samples = [sample([5] * length + [6], [0] * length + [1]) for length in lengths]
    assert plan(samples, ranks=2, budget=18).shares == (((0, 3, 5, 6),), ((1, 2, 4, 7),))
    assert plan(samples, ranks=2, budget=10).shares == (((2, 5, 7), (3, 4)), ((0,), (1, 6)))
    # a long one costs more than as many tokens in short ones
    assert plan(samples, ranks=2, budget=100, pair_cost=1.0).shares == (((0, 3, 7),), ((1, 2, 4, 5, 6),))


def test_a_sample_longer_than_the_budget_is_alone() -> None:
    made = plan([A, C, C], ranks=1, budget=4)
    assert made.shares == (((0,), (1, 2)),)


def test_k25_a_rank_without_samples_takes_part_with_a_sequence_of_pads() -> None:
    made = plan([A], ranks=2, budget=100, align=4)
    assert made.shares == (((0,),), ((),))
    (empty,) = made.micro_batches(1)
    assert (empty.ids.tolist(), empty.positions.tolist(), empty.cu_seqlens.tolist()) == ([0] * 4, [0, 1, 2, 3], [0, 4])
    assert (empty.max_length, empty.real_tokens, empty.members, empty.media) == (4, 0, (), ())
    for name in ("predictors", "targets", "sample", "logprobs", "advantages", "token_counts"):
        assert getattr(empty, name).shape == (0,)
    assert split_for_context(empty, 2, 1).predictors.tolist() == []


def test_the_number_of_micro_batches_is_a_multiple() -> None:
    assert [len(share) for share in plan([A, B, C], ranks=2, budget=5, multiple=4).shares] == [4, 4]


def test_flat_samples_are_left_out_but_counted() -> None:
    flat = sample([5, 6, 7, 8], [0, 0, 1, 1], advantage=0.0)
    silent = sample([5, 6], [0, 0])
    for skip, used in ((True, (A,)), (False, (A, flat))):
        made = plan([A, flat, silent], ranks=1, budget=100, skip_flat=skip)
        assert (made.used, made.total_tokens, made.total_samples) == (used, 5, 2)
    assert plan([flat], ranks=2, budget=100, skip_flat=True).shares == ((), ())


def test_samples_of_two_kinds_are_never_together() -> None:
    kinds = dict(zip([A, B, C], "xyx", strict=True))
    made = plan([A, B, C], ranks=1, budget=100, apart=kinds.__getitem__)
    assert made.shares == (((0, 2), (1,)),)


def test_what_cannot_be_planned_is_refused() -> None:
    with pytest.raises(TrainingError, match=r"'e0' \(segment 0\) trains its first token"):
        plan([sample([5, 6], [1, 1])], ranks=1, budget=10)
    with pytest.raises(TrainingError, match="with budget = 0; give a whole number from 1"):
        plan([A], ranks=1, budget=0)
    with pytest.raises(TrainingError, match=r"of \[5, 2\] tokens cannot be cut for cp = 2; align to 4"):
        split_for_context(only([A, C]), 2, 0)


def test_k41_experts_stay_with_their_tokens_through_padding_and_context_parallel() -> None:
    batch = only([routed(A, 10), B, routed(C, 20)], align=4)
    assert batch.experts is not None
    x = UNROUTED
    assert batch.experts[:, 0, 0].tolist() == [10, 11, 12, 13, 14, x, x, x, *[x] * 8, 20, 21, x, x]
    share = split_for_context(batch, 2, 1)
    assert share.experts is not None
    assert share.experts[:, 0, 0].tolist() == [12, 13, 14, x, x, x, x, x, 21, x]


def test_k42_all_micro_batches_have_experts_when_any_sample_has() -> None:
    made = plan([routed(A, 10), B], ranks=3, budget=5)
    assert [batch.experts is None for batch in every(made)] == [False] * 3
    wide = dataclasses.replace(B, routed_experts=np.zeros((6, 2, 1), dtype=np.int32))
    with pytest.raises(TrainingError, match=r"different \[layers, top_k\]: \[\(1, 1\), \(2, 1\)\]"):
        plan([routed(A, 10), wide], ranks=1, budget=5).micro_batches(0)


def test_k48_media_are_in_the_order_of_their_tokens_up_to_the_last_one_read() -> None:
    batch = only([C, with_media(A, (RED, 1, 2)), with_media(B, (BLUE, 1, 2), (RED, 4, 5), (LATER, 6, 7))])
    assert batch.media == (RED, BLUE, RED)


def test_the_zigzag_gives_each_rank_an_early_and_a_late_piece() -> None:
    ends = np.array([0, 8, 12], dtype=np.int32)
    assert zigzag(ends, 2, 0).tolist() == [0, 1, 6, 7, 8, 11]
    assert zigzag(ends, 2, 1).tolist() == [2, 3, 4, 5, 9, 10]
    assert zigzag(ends, 1, 0).tolist() == list(range(12))


def test_each_context_rank_knows_which_of_its_states_predict_what() -> None:
    batch = only([A, C], align=4)
    first, second = (split_for_context(batch, 2, rank) for rank in (0, 1))
    assert first.ids.tolist() == [5, 6, 0, 0, 5, 0]
    assert first.positions.tolist() == [0, 1, 6, 7, 0, 3]
    assert second.ids.tolist() == [7, 10, 11, 0, 6, 0]
    assert (first.predictors.tolist(), first.trained.tolist()) == ([], [])
    assert (second.predictors.tolist(), second.trained.tolist()) == ([0, 1, 2, 4], [0, 1, 2, 3])


# ---------------------------------------------------------------------------------------------------------------------


@st.composite
def sample_lists(draw: st.DrawFn) -> list[TrainingSample]:
    """Samples whose trained tokens have log-probs -1, -2, …, no two alike."""
    out, number = [], 0
    for _ in range(draw(st.integers(0, 12))):
        mask = [0, *draw(st.lists(st.integers(0, 1), min_size=1, max_size=16))]
        logprobs = [0.0] * len(mask)
        for place in np.flatnonzero(mask):
            number += 1
            logprobs[place] = -float(number)
        ids = draw(st.lists(st.integers(1, 60), min_size=len(mask), max_size=len(mask)))
        out.append(sample(ids, mask, advantage=draw(st.sampled_from([-1.0, 0.0, 2.0])), logprobs=logprobs))
    return out


SIZES = {"ranks": st.integers(1, 4), "budget": st.integers(1, 60), "multiple": st.integers(1, 3)}


@settings(max_examples=100, deadline=None)
@given(samples=sample_lists(), align=st.sampled_from([1, 2, 4, 12]), pair_cost=st.sampled_from([0.0, 0.1]), **SIZES)
def test_k22_every_trained_token_is_once_on_one_rank_within_the_budget(samples, align, pair_cost, **sizes) -> None:
    made = plan(samples, align=align, pair_cost=pair_cost, **sizes)
    assert len({len(share) for share in made.shares}) == 1
    assert len(made.shares[0]) % sizes["multiple"] == 0
    batches = every(made)
    got = sorted(-float(v) for batch in batches for v in batch.logprobs)
    assert got == [float(i + 1) for i in range(made.total_tokens)]
    for batch in batches:
        assert batch.padded_tokens <= sizes["budget"] or len(batch.cu_seqlens) == 2
        assert (np.diff(batch.cu_seqlens) % align == 0).all()
        assert batch.token_counts.tolist() == [member.trained_tokens for member in batch.members]


@settings(max_examples=50, deadline=None)
@given(samples=sample_lists(), cp=st.integers(1, 4))
def test_k26_the_shares_of_context_ranks_make_up_the_whole(samples, cp) -> None:
    for batch in every(plan(samples, ranks=1, budget=60, align=2 * cp)):
        states = batch.ids * 100 + batch.positions
        together, predicted = np.full(batch.padded_tokens, -1), np.full(len(batch.targets), -1)
        for rank in range(cp):
            share = split_for_context(batch, cp, rank)
            assert len(share.ids) == batch.padded_tokens // cp
            mine = share.ids * 100 + share.positions
            together[zigzag(batch.cu_seqlens, cp, rank)] = mine
            assert (predicted[share.trained] == -1).all()
            predicted[share.trained] = mine[share.predictors]
        assert (together == states).all()
        assert (predicted == states[batch.predictors]).all()


@settings(max_examples=60, deadline=None)
@given(samples=sample_lists(), **SIZES)
def test_k23_k24_sums_do_not_depend_on_how_the_batch_is_cut(samples, **sizes) -> None:
    def total(made: Plan, aggregation: str) -> float:
        out = 0.0
        for batch in every(made):
            each = token_weights(
                batch.token_counts, aggregation, total_tokens=made.total_tokens, total_samples=made.total_samples
            )
            out += float((each[batch.sample] * batch.logprobs * batch.advantages).sum())
        return out

    whole = plan(samples, ranks=1, budget=10_000)
    cut = plan(samples, skip_flat=True, **sizes)
    for aggregation in ("token-mean", "seq-mean-token-mean"):
        assert total(cut, aggregation) == pytest.approx(total(whole, aggregation), rel=1e-9, abs=1e-9)


def test_the_totals_are_those_of_the_torch_learner() -> None:
    samples = random_batch(groups=3, size=4).samples
    ours = plan(samples, ranks=2, budget=30)
    theirs = update.plan(samples, budget=30, share_prefix=False, skip_flat=False)
    assert (ours.total_tokens, ours.total_samples) == (theirs.total_tokens, theirs.total_samples)
    assert sum(batch.real_tokens for batch in every(ours)) == sum(batch.real_tokens for batch in theirs.micro_batches)


def test_long_and_short_samples_are_balanced_over_ranks() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(200, 4000, 128).tolist()
    samples = [sample([5] * length + [6], [0] * length + [1]) for length in lengths]
    made = plan(samples, ranks=8, budget=8192, align=8, pair_cost=1e-4)
    batches = [made.micro_batches(rank) for rank in range(8)]
    costs = [sum(float((n := np.diff(b.cu_seqlens)) @ (1 + 1e-4 * n)) for b in share) for share in batches]
    assert max(costs) / np.mean(costs) < 1.03
    assert len(batches[0]) == 5


def test_a_pair_costs_what_attention_computes_beside_the_matrices() -> None:
    sizes = {"hidden_size": 1024, "num_attention_heads": 16, "num_query_groups": 8, "kv_channels": 128}
    dense = SimpleNamespace(**sizes, ffn_hidden_size=3072, num_moe_experts=None)
    matrices = 1024 * (2048 + 2 * 1024) + 2048 * 1024 + 3 * 1024 * 3072
    assert pair_cost(dense) == pytest.approx(2048 / matrices)
    sparse = SimpleNamespace(**sizes, num_moe_experts=64, moe_ffn_hidden_size=384, moe_router_topk=8)
    assert pair_cost(sparse) == pytest.approx(2048 / matrices)


def shares(layout: Layout, place: Place, folder: Path, samples: Sequence[TrainingSample]) -> bool:
    """Whether this rank's backend shares samples out by what their attention costs, and that is not by their tokens."""
    learner = rank_learner(layout, place, 0, folder, Case(options={"micro_batch_tokens": 256}))
    cost = pair_cost(learner.backend.chunks[0].config)
    made = learner.backend.plan(samples, skip_flat=False).plan
    learner.close()
    by_cost, by_tokens = (plan(samples, ranks=2, budget=256, pair_cost=one).shares for one in (cost, 0.0))
    return made.shares == by_cost != by_tokens


def test_ranks_share_samples_out_by_what_they_cost(tmp_path: Path) -> None:
    samples = [sample([5] * length, [0] * (length - 1) + [1]) for length in (200, 150, 100, 60, 60, 30, 20, 10)]
    assert on_ranks(Layout(dp=2), shares, Folders(tmp_path)["dense"], samples) == [True, True]
