"""The numbers each algorithm must give, from its formula."""

import math

import numpy as np
import pytest
import torch
from algorithm_cases import NAMES, build, group, t, tokens

from relax_gym.plugins import plugins
from relax_gym_trainers.functional import (
    anchored_ratio,
    cispo_loss,
    leave_one_out,
    overlong_penalty,
    reinforce_loss,
    sapo_loss,
    whiten,
)
from relax_gym_trainers.objective import policy_loss


def test_every_algorithm_is_registered():
    # opd has no loss without a teacher; see test_distillation.py
    assert plugins().tables["algorithm"].names() == sorted([*NAMES, "opd"])


# ---- rewards to advantages -----------------------------------------------------------------------


ADVANTAGES = {
    "cispo": [0.866024, -0.866024, -0.866024, 0.866024],
    "dapo": [0.866024, -0.866024, -0.866024, 0.866024],
    "dr_grpo": [0.5, -0.5, -0.5, 0.5],
    "grpo": [0.866024, -0.866024, -0.866024, 0.866024],
    "gspo": [0.866024, -0.866024, -0.866024, 0.866024],
    "gspo_token": [0.866024, -0.866024, -0.866024, 0.866024],
    "reinforce_pp": [1.0, 0.0, 0.0, 1.0],
    "reinforce_pp_baseline": [0.5, -0.5, -0.5, 0.5],
    "rloo": [0.666667, -0.666667, -0.666667, 0.666667],
    "sapo": [0.866024, -0.866024, -0.866024, 0.866024],
    "sft": [1.0, 0.0, 0.0, 1.0],
}


@pytest.mark.parametrize("name", NAMES)
def test_advantages_of_one_group(name):
    assert build(name).advantages(np.array([1.0, 0.0, 0.0, 1.0])) == pytest.approx(ADVANTAGES[name], abs=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_k74_what_could_not_be_scored_is_in_no_statistic_and_gets_0(name):
    got = build(name).advantages(np.array([1.0, math.nan, 0.0, 0.0, 1.0]))
    first, *rest = ADVANTAGES[name]
    assert got == pytest.approx([first, 0.0, *rest], abs=1e-6)
    assert build(name).advantages(np.array([math.nan, math.nan])).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"reinforce_pp", "sft"}))
@pytest.mark.parametrize("rewards", [[0.7], [0.1, 0.1, 0.1], [1e8, 1e8], [math.nan, 0.3]])
def test_a_group_without_contrast_gives_exactly_zero(name, rewards):
    assert build(name).advantages(np.array(rewards)).tolist() == [0.0] * len(rewards)


def test_leave_one_out_is_the_reward_minus_the_mean_of_the_others():
    rewards = np.array([3.0, 0.0, 1.0, 6.0])
    others = [rewards[i] - np.delete(rewards, i).mean() for i in range(4)]
    assert leave_one_out(rewards) == pytest.approx(others)
    assert leave_one_out(np.array([3.0, math.nan, 1.0])).tolist() == [2.0, 0.0, -2.0]


def test_whitening_is_two_pass_and_unbiased():
    assert whiten(np.array([1.0, -1.0, 1.0])) == pytest.approx([0.57735, -1.15470, 0.57735], abs=1e-5)
    assert whiten(np.full(5, 0.1)).tolist() == [0.0] * 5
    assert whiten(np.array([4.0])).tolist() == [0.0]
    assert whiten(np.array([])).tolist() == []


@pytest.mark.parametrize("deviation", [1e-3, 1e-6])
def test_whitening_keeps_the_variance_of_values_far_from_zero(deviation):
    values = np.random.default_rng(0).normal(1000.0, deviation, 4096)
    white = whiten(values)
    assert white.std(ddof=1) == pytest.approx(1.0, abs=2e-3)
    assert abs(white.mean()) < 1e-6


def test_overlong_penalty_falls_over_the_buffer():
    got = overlong_penalty(np.array([0, 12, 13, 14, 16, 99]), start=12, end=16)
    assert got.tolist() == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]


def test_dapo_shapes_the_reward_of_long_episodes_before_normalising():
    dapo = build("dapo", overlong_range=(2, 6))
    played = group([1.0, 1.0, None], lengths=[2, 4, 4])
    assert dapo.shaped_rewards(played)[:2].tolist() == [1.0, 0.5]
    assert math.isnan(dapo.shaped_rewards(played)[2])
    assert build("dapo").shaped_rewards(played)[:2].tolist() == [1.0, 1.0]


def test_sft_keeps_the_best_or_all_that_reach_the_bar():
    rewards = np.array([0.2, 0.9, math.nan, 0.9])
    assert build("sft").advantages(rewards).tolist() == [0, 1, 0, 1]
    assert build("sft", keep="all").advantages(rewards).tolist() == [1, 1, 0, 1]
    assert build("sft", keep="all", min_reward=0.5).advantages(rewards).tolist() == [0, 1, 0, 1]
    assert build("sft", min_reward=1.0).advantages(rewards).tolist() == [0, 0, 0, 0]


# ---- token losses --------------------------------------------------------------------------------


def ratio_tokens(ratio, advantage):
    return tokens(t(*ratio).log() - 1, advantage)


@pytest.mark.parametrize(
    ("name", "options", "ratio", "advantage", "expected"),
    [
        ("dapo", {}, 1.5, 1.0, -1.28),
        ("dapo", {}, 0.5, -1.0, 0.8),
        ("dapo", {}, 5.0, -1.0, 5.0),
        ("dapo", {"dual_clip": 3.0}, 5.0, -1.0, 3.0),
        ("grpo", {}, 1.5, 1.0, -1.2),
        ("dr_grpo", {}, 1.5, 1.0, -1.2),
        ("reinforce_pp", {}, 0.5, -1.0, 0.8),
        ("reinforce_pp_baseline", {}, 1.5, 1.0, -1.2),
        ("sapo", {}, 1.0, 1.0, -2.0),
        ("sapo", {}, 1.0, -1.0, 2 / 1.05),
        ("sapo", {}, 1.5, 1.0, -2.489837),
        ("sapo", {}, 0.5, -1.0, 1.415938),
        ("cispo", {}, 1.5, 1.0, -1.5 * (math.log(1.5) - 1)),
        ("cispo", {"clip_high": 0.28}, 1.5, 1.0, -1.28 * (math.log(1.5) - 1)),
        ("cispo", {"clip_low": 0.2}, 0.5, -1.0, 0.8 * (math.log(0.5) - 1)),
        ("cispo", {}, 9.0, 1.0, -5.0 * (math.log(9.0) - 1)),
        ("rloo", {}, 1.5, 2.0, -2.0 * (math.log(1.5) - 1)),
        ("sft", {}, 1.5, 1.0, -(math.log(1.5) - 1)),
        ("gspo", {}, 1.5, 1.0, -1.0004),
        ("gspo", {}, 0.5, -1.0, 0.9997),
        ("gspo_token", {}, 1.5, 1.0, -1.0004),
    ],
)
def test_token_loss(name, options, ratio, advantage, expected):
    loss = build(name, **options).token_loss(ratio_tokens([ratio], [advantage]))
    assert loss.tolist() == pytest.approx([expected], abs=1e-6)


@pytest.mark.parametrize("name", ["gspo", "gspo_token"])
def test_gspo_has_one_ratio_for_the_sequence(name):
    whole = tokens(t(-1.2, -0.9, -1.3, -0.7), [1.0] * 4, sample=[0, 0, 0, 1])
    ratio = build(name).ratio(whole)
    assert ratio.tolist() == pytest.approx([0.875173] * 3 + [math.exp(0.3)], abs=1e-6)
    loss = build(name).token_loss(whole)
    assert loss.tolist() == pytest.approx([-0.875173] * 3 + [-1.0004], abs=1e-6)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("tau", [0.5, 1.0, 1.05, 3.0])
def test_sapo_at_ratio_1_is_2_over_tau_with_slope_1(advantage, tau):
    ratio = t(1.0).requires_grad_()
    loss = sapo_loss(ratio, t(advantage), tau_positive=tau, tau_negative=tau)
    loss.sum().backward()
    assert loss.item() == pytest.approx(-advantage * 2 / tau)
    assert ratio.grad.item() == pytest.approx(-advantage)


# ---- gradients -----------------------------------------------------------------------------------


LOGPROBS, OLD, ADVANTAGE, SAMPLE = [-1.1, -0.9, -2.0, -1.3, -0.7], [-1.0, -1.2, -2.1, -0.8, -1.0], 0.7, [0, 0, 1, 1, 1]


# The detached weight of CISPO and the anchor of GSPO-token are constants to autograd but not to a finite difference;
# their gradients are checked against closed forms below.
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("name", sorted(set(NAMES) - {"cispo", "gspo_token"}))
def test_gradients_are_those_of_finite_differences(name, sign):
    wide = {"clip_low": 0.35, "clip_high": 0.5} if name == "gspo" else {}
    algorithm = build(name, **wide)

    def loss(logprobs):
        return algorithm.token_loss(tokens(logprobs, [sign * ADVANTAGE] * 5, old=OLD, sample=SAMPLE))

    assert torch.autograd.gradcheck(loss, t(*LOGPROBS).requires_grad_())
    assert loss(t(*LOGPROBS)).dtype == torch.float64


def test_the_gradient_of_cispo_is_that_of_weighted_likelihood_and_never_vanishes():
    ratio, advantages = t(0.1, 0.9, 1.1, 9.0), t(1.0, -1.0, 2.0, 1.0)
    assert torch.autograd.gradcheck(
        lambda x: cispo_loss(x, ratio, advantages, clip_low=0.2, clip_high=0.28), t(-1, -2, -3, -4).requires_grad_()
    )
    logprobs = (ratio.log() - 1).requires_grad_()
    build("cispo", clip_low=0.2, clip_high=0.28).token_loss(tokens(logprobs, advantages.tolist())).sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([-0.8, 0.9, -2.2, -1.28])


def test_gspo_token_equals_gspo_when_the_sample_has_one_advantage():
    grads = []
    for name in ("gspo", "gspo_token"):
        logprobs = t(*LOGPROBS).requires_grad_()
        algorithm = build(name, clip_low=0.35, clip_high=0.5)
        loss = algorithm.token_loss(tokens(logprobs, [ADVANTAGE] * 5, old=OLD, sample=SAMPLE))
        loss.sum().backward()
        grads.append(logprobs.grad)
    torch.testing.assert_close(*grads)


def test_gspo_token_gives_each_token_its_own_advantage():
    logprobs = t(-1.2, -0.9, -1.3).requires_grad_()
    loss = build("gspo_token", clip_low=0.35).token_loss(tokens(logprobs, [1.0, -2.0, 0.5], sample=[0, 0, 0]))
    loss.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([-0.875173, 1.750347, -0.437587], abs=1e-6)


def test_anchored_ratio_has_the_value_of_the_sequence_and_the_gradient_of_the_token():
    logprobs = t(-5.0, -0.1).requires_grad_()
    ratio = anchored_ratio(logprobs, t(1.25, 0.5))
    ratio.sum().backward()
    assert ratio.tolist() == [1.25, 0.5]
    assert logprobs.grad.tolist() == [1.25, 0.5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gap", [-2000.0, 100.0, 2000.0])
@pytest.mark.parametrize("name", NAMES)
def test_a_ratio_that_overflows_gives_no_nan_where_nothing_is_to_be_learned(name, gap, dtype):
    """A = 0 for the first sample, whose ratio overflows; icepop drops the third. Each is one token."""
    logprobs = torch.tensor([gap - 1, -1.1, gap - 1], dtype=dtype, requires_grad=True)
    extreme = tokens(logprobs, [0.0, 0.5, -1.0], rollout=[-1.0, -1.0, -99.0], sample=[0, 1, 2])
    for losses in (
        build(name).token_loss(extreme)[:2],
        policy_loss(build(name, correction="icepop", old_logprobs="recompute"), extreme),
    ):
        (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
        assert losses[0] == 0
        assert losses.isfinite().all()
        assert gradient.isfinite().all()
        assert gradient[0] == gradient[2] == 0
        assert gradient[1] != 0


@pytest.mark.parametrize("gap", [1e-9, 0.3, -7.0, 19.9, -19.9])
def test_a_ratio_whose_log_is_below_20_is_not_touched(gap):
    whole = tokens(t(gap - 1, gap - 1), [1.0, 1.0], sample=[0, 0])
    plain = (whole.logprobs - whole.old_logprobs).exp()
    assert torch.equal(whole.ratio, plain)
    assert torch.equal(whole.sequence_ratio, whole.sample_mean(whole.logprobs - whole.old_logprobs).exp())


def test_reinforce_has_the_advantage_as_gradient():
    logprobs = t(-5.0, -0.1).requires_grad_()
    reinforce_loss(logprobs, t(2.0, -3.0)).sum().backward()
    assert logprobs.grad.tolist() == [-2.0, 3.0]
