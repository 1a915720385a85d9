"""The numbers of the pure functions."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from relax_gym.algorithm import TrainedTokens
from relax_gym_trainers.functional import group_normalise, kl_estimate, ppo_clip_loss, token_weights


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_group_normalise_divides_by_the_unbiased_deviation():
    got = group_normalise(np.array([1.0, 0.0, 0.0, 1.0]))
    assert got == pytest.approx([0.866024, -0.866024, -0.866024, 0.866024], abs=1e-6)
    assert got.dtype == np.float64


def test_group_normalise_without_scale_only_centres():
    assert group_normalise(np.array([3.0, 0.0, 0.0, 1.0]), scale="none").tolist() == [2.0, -1.0, -1.0, 0.0]


@pytest.mark.parametrize("rewards", [[0.7], [0.1, 0.1, 0.1], [1e8] * 3, [math.nan, 0.3], [math.nan], []])
@pytest.mark.parametrize("scale", ["std", "none"])
def test_a_group_without_contrast_gives_exactly_zero(rewards, scale):
    assert group_normalise(np.array(rewards), scale=scale).tolist() == [0.0] * len(rewards)


def test_k74_unscorable_episodes_are_in_no_statistic_and_get_zero():
    got = group_normalise(np.array([1.0, math.nan, 0.0, 0.0, 1.0]))
    assert got == pytest.approx([0.866024, 0.0, -0.866024, -0.866024, 0.866024], abs=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual_clip", "expected"),
    [
        (1.5, 1.0, None, -1.28),
        (0.5, -1.0, None, 0.8),
        (5.0, -1.0, None, 5.0),
        (5.0, -1.0, 3.0, 3.0),
        (5.0, 1.0, 3.0, -1.28),
        (0.5, 1.0, None, -0.5),
        (1.0, -2.0, 3.0, 2.0),
    ],
)
def test_ppo_clip_loss(ratio, advantage, dual_clip, expected):
    loss = ppo_clip_loss(t(ratio), t(advantage), clip_low=0.2, clip_high=0.28, dual_clip=dual_clip)
    assert loss.tolist() == pytest.approx([expected])


def test_ppo_clip_gradient_stops_outside_the_clip_range_only_where_it_pays():
    ratio = t(1.5, 0.5, 1.5, 0.5, 1.1, 5.0).requires_grad_()
    ppo_clip_loss(ratio, t(1, 1, -1, -1, 1, -1), clip_low=0.2, clip_high=0.28, dual_clip=3.0).sum().backward()
    assert ratio.grad.tolist() == [0.0, -1.0, 1.0, 0.0, -1.0, 0.0]


@pytest.mark.parametrize(
    ("delta", "k1", "k2", "k3"), [(0.5, 0.5, 0.125, 0.106531), (-0.5, -0.5, 0.125, 0.148721), (0.0, 0.0, 0.0, 0.0)]
)
def test_kl_estimators(delta, k1, k2, k3):
    got = [kl_estimate(t(delta - 1), t(-1), name).item() for name in ("k1", "k2", "k3")]
    assert got == pytest.approx([k1, k2, k3], abs=1e-6)


def test_the_estimator_k3_is_cut_at_ten_and_its_gradient_stays_finite():
    logprobs = t(-1000.0, -4.0, 1000.0).requires_grad_()
    estimate = kl_estimate(logprobs, t(-1.0, -1.0, -1.0), "k3")
    estimate.sum().backward()
    assert estimate.tolist() == [10.0, 10.0, 10.0]
    assert logprobs.grad.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_kl_losses_have_the_right_gradient(estimator):
    reference = t(-1.0, -0.2, -3.0)
    assert torch.autograd.gradcheck(
        lambda x: kl_estimate(x, reference, estimator), t(-1.2, -0.1, -2.0).requires_grad_()
    )


@pytest.mark.parametrize(
    ("aggregation", "norm", "expected"),
    [("token-mean", None, 5 / 3), ("seq-mean-token-mean", None, 2.0), ("seq-mean-token-sum-norm", 4.0, 5 / 8)],
)
def test_aggregation_of_token_losses_1_1_and_3(aggregation, norm, expected):
    weights = token_weights([2, 1], aggregation, total_tokens=3, total_samples=2, norm=norm)
    assert weights[[0, 0, 1]] @ np.array([1.0, 1.0, 3.0]) == pytest.approx(expected)


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_k23_weights_depend_on_the_global_batch_and_not_on_how_it_is_cut(aggregation):
    def weights(counts):
        return token_weights(counts, aggregation, total_tokens=10, total_samples=4, norm=5.0).tolist()

    assert weights([1, 4, 2, 3]) == weights([1]) + weights([4, 2]) + weights([3])


def test_sum_norm_without_norm_is_refused():
    with pytest.raises(ValueError, match="needs norm"):
        token_weights([1], "seq-mean-token-sum-norm", total_tokens=1, total_samples=1)


def test_sample_mean_is_per_sample_and_broadcast():
    tokens = TrainedTokens(
        logprobs=t(0, 0, 0),
        old_logprobs=t(0, 0, 0),
        rollout_logprobs=t(0, 0, 0),
        advantages=t(1, 1, 1),
        sample=torch.tensor([0, 2, 0]),
        num_samples=3,
    )
    assert tokens.sample_mean(t(1.0, 5.0, 2.0)).tolist() == [1.5, 5.0, 1.5]


def test_options_and_algorithms_are_checked_without_torch():
    code = (
        "import sys, relax_gym_trainers.objective, relax_gym_trainers.torch_learner.options; "
        "from relax_gym.plugins import plugins; table = plugins().tables['algorithm']; "
        "[table.get(name) for name in table.names()]; "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
