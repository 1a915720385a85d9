"""What must not change a loss or its gradient: order, cut, padding, and whatever stands at masked positions."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from algorithm_cases import NAMES, NEEDED, build, loss_and_gradient, random_samples
from hypothesis import given, settings
from hypothesis import strategies as st

CASES = {
    **{name: (name, {}) for name in NAMES},
    "tis-token": ("grpo", {"correction": "tis", "old_logprobs": "recompute"}),
    "icepop-sequence": (
        "gspo",
        {"correction": "icepop", "correction_level": "sequence", "old_logprobs": "recompute", "icepop_high": 1.2},
    ),
    "masked-kl-entropy": ("sapo", {"sequence_mask_delta": 0.1, "kl_coef": 0.3, "entropy_coef": 0.02}),
    "kl-k2": ("reinforce_pp_baseline", {"kl_coef": 0.3}),
    "kl-reward": ("grpo", {"kl_reward_coef": 0.2}),
    "kl-reward-whitened": ("reinforce_pp", {"kl_reward_coef": 0.2, "old_logprobs": "recompute"}),
    "dual-clip": ("dapo", {"dual_clip": 1.3}),
    "gspo_token-sum-norm": ("gspo_token", {"aggregation": "seq-mean-token-sum-norm", "token_sum_norm": 7.0}),
    **{
        f"grpo-{aggregation}": ("grpo", {"aggregation": aggregation, **norm})
        for aggregation, norm in [("token-mean", {}), ("seq-mean-token-sum-norm", {"token_sum_norm": 7.0})]
    },
}


def case(name):
    algorithm, options = CASES[name]
    return build(algorithm, **options)


def assert_same(one, two):
    assert one[0] == pytest.approx(two[0], rel=1e-10, abs=1e-12)
    torch.testing.assert_close(one[1], two[1], rtol=1e-9, atol=1e-12)


seeds, counts = st.integers(0, 2**16), st.integers(1, 7)
few = settings(max_examples=12, deadline=None, derandomize=True)


def test_the_cases_cover_every_algorithm():
    assert {algorithm for algorithm, _ in CASES.values()} == set(NAMES) >= set(NEEDED)


@pytest.mark.parametrize("name", CASES)
@few
@given(seed=seeds, count=counts, budget=st.integers(1, 60), share=st.booleans(), data=st.data())
def test_k23_k24_k26_order_micro_batches_and_padding_change_nothing(name, seed, count, budget, share, data):
    samples = random_samples(np.random.default_rng(seed), count)
    shuffled = data.draw(st.permutations(samples))
    whole = loss_and_gradient(case(name), samples)
    assert_same(loss_and_gradient(case(name), shuffled, budget=budget, share=share), whole)


@pytest.mark.parametrize("name", CASES)
@few
@given(seed=seeds, count=counts, ranks=st.sampled_from([2, 4]), budget=st.integers(1, 60), data=st.data())
def test_k23_the_sum_over_ranks_is_the_whole_whatever_rank_a_sample_is_on(name, seed, count, ranks, budget, data):
    samples = random_samples(np.random.default_rng(seed), count)
    rank_of = data.draw(st.lists(st.integers(0, ranks - 1), min_size=count, max_size=count))
    shards = [[index for index, own in enumerate(rank_of) if own == rank] for rank in range(ranks)]
    assert_same(
        loss_and_gradient(case(name), samples, budget=budget, ranks=shards), loss_and_gradient(case(name), samples)
    )


@pytest.mark.parametrize("name", CASES)
@few
@given(seed=seeds, count=counts, poison=st.sampled_from([math.nan, math.inf, -math.inf, 1e30]))
def test_k16_k20_values_at_masked_positions_change_nothing(name, seed, count, poison):
    samples = random_samples(np.random.default_rng(seed), count)

    def poisoned(sample):
        off = sample.loss_mask == 0
        return dataclasses.replace(
            sample,
            logprobs=np.where(off, np.float32(poison), sample.logprobs),
            advantages=np.where(off, np.float32(poison), sample.advantages),
        )

    clean = loss_and_gradient(case(name), samples)
    dirty = loss_and_gradient(case(name), [poisoned(sample) for sample in samples])
    assert dirty[0] == clean[0]
    assert torch.equal(dirty[1], clean[1])


@pytest.mark.parametrize("name", CASES)
@few
@given(seed=seeds, count=counts, tail=st.integers(1, 9))
def test_tokens_after_the_last_trained_one_change_nothing(name, seed, count, tail):
    samples = random_samples(np.random.default_rng(seed), count)

    def longer(sample):
        ids, zeros = np.zeros(tail, dtype=np.int32), np.zeros(tail)
        return dataclasses.replace(
            sample,
            token_ids=np.concatenate([sample.token_ids, ids]),
            loss_mask=np.concatenate([sample.loss_mask, zeros.astype(np.int8)]),
            logprobs=np.concatenate([sample.logprobs, zeros.astype(np.float32)]),
            versions=np.concatenate([sample.versions, ids - 1]),
            advantages=np.concatenate([sample.advantages, zeros.astype(np.float32)]),
        )

    whole = loss_and_gradient(case(name), samples)
    assert_same(loss_and_gradient(case(name), [longer(sample) for sample in samples]), whole)


@pytest.mark.parametrize("name", CASES)
def test_no_case_is_trivial(name):
    loss, gradient = loss_and_gradient(case(name), random_samples(np.random.default_rng(0), 12))
    assert loss != 0.0
    assert gradient.abs().max() > 1e-4


@pytest.mark.parametrize("name", CASES)
def test_k16_rows_of_the_table_that_predict_env_tokens_only_have_no_gradient(name):
    samples = random_samples(np.random.default_rng(3), 3)
    _, gradient = loss_and_gradient(case(name), samples)
    predictors = {
        int(sample.token_ids[index - 1]) for sample in samples for index in np.flatnonzero(sample.loss_mask == 1)
    }
    with_gradient = {row for row in range(len(gradient)) if gradient[row].abs().max() > 0}
    assert with_gradient
    assert with_gradient <= predictors < set(range(len(gradient)))
