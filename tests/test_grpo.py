"""GRPO as an algorithm: options, advantages, loss."""

import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from relax_gym.algorithm import TrainedTokens
from relax_gym.config import RunConfig, plugin_options
from relax_gym.errors import ConfigError
from relax_gym.plugins import plugins
from relax_gym_trainers.algorithms.grpo import GRPO


def tokens(ratio, advantages, logprobs=None):
    old = torch.full((len(ratio),), -1.0, dtype=torch.float64)
    if logprobs is None:
        logprobs = old + torch.tensor(ratio, dtype=torch.float64).log()
    return TrainedTokens(
        logprobs=logprobs,
        old_logprobs=old,
        rollout_logprobs=old,
        advantages=torch.tensor(advantages, dtype=torch.float64),
        sample=torch.arange(len(ratio)),
        num_samples=len(ratio),
    )


def test_defaults_are_the_papers():
    algorithm = GRPO()
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip, algorithm.scale) == (0.2, 0.2, None, "std")
    assert algorithm.aggregation == "seq-mean-token-mean"
    assert algorithm.needs_group


def test_it_is_registered_and_its_options_come_from_the_config():
    assert plugins().get("algorithm", "grpo") is GRPO


def test_advantages():
    got = GRPO().advantages(np.array([1.0, 0.0, 0.0, 1.0]))
    assert got == pytest.approx([0.866024, -0.866024, -0.866024, 0.866024], abs=1e-6)
    assert GRPO(scale="none").advantages(np.array([1.0, 0.0])).tolist() == [0.5, -0.5]
    assert GRPO().advantages(np.array([0.3, 0.3, math.nan])).tolist() == [0.0, 0.0, 0.0]
    assert GRPO().advantages(np.array([5.0])).tolist() == [0.0]


def test_token_loss_with_clip_higher():
    loss = GRPO(clip_high=0.28).token_loss(tokens([1.5, 0.5, 5.0], [1.0, -1.0, -1.0]))
    assert loss.tolist() == pytest.approx([-1.28, 0.8, 5.0])


def test_token_loss_with_dual_clip():
    assert GRPO(dual_clip=3.0).token_loss(tokens([5.0], [-1.0])).tolist() == pytest.approx([3.0])


def test_token_loss_gradient():
    start = torch.tensor([-1.1, -0.9, -1.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: GRPO().token_loss(tokens([1, 1, 1], [1.0, -1.0, 0.5], x)), start)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_lw": 0.1}, r"unknown key 'algorithm.clip_lw' \(value 0.1\); did you mean 'clip_low'"),
        ({"dual_clip": 1.0}, r"algorithm.dual_clip = 1.0: Input should be greater than 1"),
        ({"clip_low": 1.0}, r"algorithm.clip_low = 1.0: Input should be less than 1"),
        ({"scale": "max"}, r"algorithm.scale = 'max': Input should be 'std' or 'none'"),
        (
            {"kl_estimator": "k1"},
            r"algorithm.kl_estimator = 'k1': k1 is no loss: its gradient does not depend",
        ),
        ({"aggregation": "seq-mean-token-sum-norm"}, r"go together"),
    ],
)
def test_bad_options_are_named(options, message):
    config = RunConfig.model_validate(
        {
            "model": {"name": "m"},
            "env": [{"id": "a/B-v0"}],
            "algorithm": {"name": "grpo", **options},
            "train": {"steps": 1, "groups_per_step": 1, "group_size": 2},
        }
    )
    with pytest.raises(ConfigError, match=message):
        plugin_options(config.algorithm, GRPO, source="run.toml", key="algorithm")


def test_options_are_frozen():
    with pytest.raises(ValidationError):
        GRPO().clip_low = 0.3
