"""Losses and gradients against TRL's own code in the configuration that means the same. See docs/algorithms.md.

TRL computes its loss only inside a trainer, so `Trainer` here is the smallest thing its method runs on: it hands over
given log-probs in place of a model's. All samples have one prompt token, which both sides leave out of the loss.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from algorithm_cases import build
from trl.trainer.grpo_trainer import GRPOTrainer

from relax_gym.algorithm import TrainedTokens
from relax_gym_trainers.functional import kl_estimate, token_weights
from relax_gym_trainers.objective import policy_loss

LENGTHS, WIDTH, MAX_LENGTH = (3, 1, 6, 4), 6, 8


class Accelerator:
    num_processes = 1

    def gather(self, values):
        return values

    def reduce(self, values, reduction):
        return values


class Trainer:
    """What `GRPOTrainer._compute_loss` reads."""

    aux_loss_enabled = False
    top_entropy_quantile = 1.0
    current_gradient_accumulation_steps = 1
    vllm_importance_sampling_correction = True
    max_completion_length = MAX_LENGTH
    _entropy_bonus_enabled = False
    get_off_policy_mask = staticmethod(GRPOTrainer.get_off_policy_mask)

    def __init__(
        self, logprobs, *, loss_type, low=0.2, high=0.2, level="token", beta=0.0, mask=None, vllm=False, **args
    ):
        self.logprobs = logprobs
        self.loss_type, self.epsilon_low, self.epsilon_high = loss_type, low, high
        self.importance_sampling_level, self.beta, self.off_policy_mask_threshold = level, beta, mask
        self.use_vllm = vllm
        self.args = SimpleNamespace(
            **{"delta": None, "use_bias_correction_kl": False, "steps_per_generation": 1, **args}
        )
        self.model = SimpleNamespace(training=True)
        self.accelerator = Accelerator()
        self._metrics = {"train": defaultdict(list)}

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        return self.logprobs, torch.zeros_like(self.logprobs), None


class Numbers:
    """Random log-probs [4, 6] of four samples, right-padded, and one advantage for each sample."""

    def __init__(self, seed):
        rng = np.random.default_rng(seed)

        def draw(spread, around=0.0):
            return torch.from_numpy(around + rng.normal(0, spread, (len(LENGTHS), WIDTH)))

        self.old = draw(0.5, -2.0)
        self.new, self.roll, self.ref = self.old + draw(0.3), self.old + draw(0.4), self.old + draw(0.4)
        self.advantages = torch.from_numpy(rng.normal(size=len(LENGTHS)))
        self.mask = torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]

    def trl(self, **options):
        """Loss and gradient [N] of TRL's code."""
        logprobs = self.new.clone().requires_grad_()
        ids = torch.zeros(len(LENGTHS), WIDTH, dtype=torch.int64)
        ratio = (self.old - self.roll).exp()
        inputs = {
            "prompt_ids": ids[:, :1],
            "prompt_mask": torch.ones_like(ids[:, :1]),
            "completion_ids": ids,
            "completion_mask": self.mask.to(torch.float64),
            "advantages": self.advantages,
            "old_per_token_logps": self.old,
            "sampling_per_token_logps": self.roll,
            "ref_per_token_logps": self.ref,
            "importance_sampling_ratio": ratio.clamp(max=2.0),
            "num_items_in_batch": self.mask.sum(),
        }
        loss = GRPOTrainer._compute_loss(Trainer(logprobs, **options), None, inputs)
        loss.backward()
        return loss.item(), logprobs.grad[self.mask]

    def ours(self, name, **options):
        """Loss and gradient [N] of our parts, put together as every learner does."""
        algorithm = build(name, **options)
        leaf = self.new[self.mask].clone().requires_grad_()
        sample = torch.arange(len(LENGTHS))[:, None].expand(-1, WIDTH)[self.mask]
        tokens = TrainedTokens(
            logprobs=leaf,
            old_logprobs=self.old[self.mask],
            rollout_logprobs=self.roll[self.mask],
            advantages=self.advantages[sample],
            sample=sample,
            num_samples=len(LENGTHS),
        )
        each = token_weights(
            LENGTHS,
            algorithm.aggregation,
            total_tokens=sum(LENGTHS),
            total_samples=len(LENGTHS),
            norm=algorithm.token_sum_norm,
        )
        losses = policy_loss(algorithm, tokens)
        if algorithm.kl_coef:
            losses = losses + algorithm.kl_coef * kl_estimate(leaf, self.ref[self.mask], algorithm.kl_estimator)
        loss = (torch.from_numpy(each)[sample] * losses).sum()
        loss.backward()
        return loss.item(), leaf.grad


SAPO_ARGS = {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
TIS = {"correction": "tis", "old_logprobs": "recompute"}
PAIRS = {
    "grpo": ("grpo", {}, {"loss_type": "grpo"}),
    "grpo-kl": ("grpo", {"kl_coef": 0.04}, {"loss_type": "grpo", "beta": 0.04}),
    "grpo-tis": ("grpo", TIS, {"loss_type": "grpo", "vllm": True}),
    "grpo-sequence-mask": ("grpo", {"sequence_mask_delta": 0.05}, {"loss_type": "grpo", "mask": 0.05}),
    "dapo": ("dapo", {}, {"loss_type": "dapo", "high": 0.28}),
    "dr_grpo": ("dr_grpo", {"token_sum_norm": float(MAX_LENGTH)}, {"loss_type": "dr_grpo"}),
    "gspo": ("gspo", {}, {"loss_type": "grpo", "level": "sequence", "low": 3e-4, "high": 4e-4}),
    "gspo-wide": (
        "gspo",
        {"clip_low": 0.2, "clip_high": 0.2},
        {"loss_type": "grpo", "level": "sequence"},
    ),
    "sapo": ("sapo", {}, {"loss_type": "sapo", **SAPO_ARGS}),
    # TRL bounds the ratio itself from above (epsilon_high = 5 means r ≤ 5) and never from below.
    "cispo": ("cispo", {"clip_low": 1.0, "clip_high": 4.0}, {"loss_type": "cispo", "high": 5.0}),
    "cispo-tight": ("cispo", {"clip_low": 1.0, "clip_high": 0.1}, {"loss_type": "cispo", "high": 1.1}),
    # Its `delta` cuts the unclipped ratio, which for A < 0 is the dual clip; for A > 0 the clip binds first.
    "dual-clip": ("dapo", {"dual_clip": 1.3}, {"loss_type": "dapo", "high": 0.28, "delta": 1.3}),
}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", PAIRS)
def test_loss_and_gradient_equal_those_of_trl(name, seed):
    algorithm, ours, trl = PAIRS[name]
    numbers = Numbers(seed)
    expected_loss, expected = numbers.trl(**trl)
    loss, gradient = numbers.ours(algorithm, **ours)
    assert loss == pytest.approx(expected_loss, rel=1e-5, abs=1e-9)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("name", sorted(set(PAIRS) - {"gspo"}))
def test_the_numbers_compared_are_not_all_alike(name):
    algorithm, ours, _ = PAIRS[name]
    gradients = [Numbers(seed).ours(algorithm, **ours)[1] for seed in range(5)]
    assert all(gradient.abs().max() > 1e-3 for gradient in gradients)
    assert len({round(gradient.sum().item(), 9) for gradient in gradients}) == 5


def test_trl_bounds_the_weight_of_cispo_from_one_side_only():
    """With a lower bound as the paper's formula has it, a token of small ratio weighs more than TRL gives it."""
    numbers = Numbers(0)
    _, one_sided = numbers.trl(loss_type="cispo", high=1.28)
    _, published = numbers.ours("cispo", clip_low=0.2, clip_high=0.28)
    small = ((numbers.new - numbers.old).exp() < 0.8)[numbers.mask]
    assert small.any()
    assert (published[small].abs() > one_sided[small].abs()).all()
    torch.testing.assert_close(published[~small], one_sided[~small], rtol=1e-5, atol=1e-9)
