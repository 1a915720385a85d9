"""Where the parts of an algorithm meet: what every learner computes for the trained tokens of some samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relax_gym.algorithm import Algorithm, TrainedTokens
from relax_gym_trainers.functional import icepop_weight, keeps_sequence, kl_estimate, truncated_weight

if TYPE_CHECKING:
    from torch import Tensor


def policy_loss(algorithm: Algorithm, tokens: TrainedTokens) -> Tensor:
    """The algorithm's loss of each token times its off-policy weight, [N]. A token of weight 0 is left out."""
    loss = algorithm.token_loss(tokens)
    if algorithm.correction == "none" and algorithm.sequence_mask_delta is None:
        return loss
    weight = correction_weight(algorithm, tokens)
    return loss.where(weight != 0, 0.0) * weight


def correction_weight(algorithm: Algorithm, tokens: TrainedTokens) -> Tensor:
    """Weight of each token's policy loss, [N], without gradient.

    With a correction it stands for π_old over the policy *version* that sampled the token, so together with the ratio
    π/π_old this is decoupled PPO: behaviour and proximal policy apart (Hilton et al. 2022, arXiv:2110.00641).
    Sequence masking compares the policy as it is now with the sampler's, which covers drift and mismatch alike.
    """
    log_ratio = (tokens.old_logprobs - tokens.rollout_logprobs).detach()
    if algorithm.correction_level == "sequence":
        log_ratio = tokens.sample_mean(log_ratio)
    weight = log_ratio.new_ones(log_ratio.shape)
    if algorithm.correction == "tis":
        weight = truncated_weight(log_ratio, cap=algorithm.correction_cap)
    elif algorithm.correction == "icepop":
        weight = icepop_weight(log_ratio, low=algorithm.icepop_low, high=algorithm.icepop_high)
    if algorithm.sequence_mask_delta is not None:
        drift = tokens.sample_mean((tokens.rollout_logprobs - tokens.logprobs).detach())
        weight = weight.where(keeps_sequence(tokens.advantages, drift, delta=algorithm.sequence_mask_delta), 0.0)
    return weight


def mismatch(algorithm: Algorithm, tokens: TrainedTokens) -> dict[str, Tensor]:
    """How far ℓ, of the weights before any update, is from ℓ_roll, by token, [N] each, without gradient.

    `mean` is |ℓ − ℓ_roll|, `k3` the estimate of KL(sampler‖learner), `clipped` whether exp(ℓ − ℓ_roll), at the level of
    the correction, is what it cuts: outside [icepop_low, icepop_high] with icepop, else above correction_cap.
    """
    logprobs = tokens.logprobs.detach()
    gap = logprobs - tokens.rollout_logprobs
    ratio = (tokens.sample_mean(gap) if algorithm.correction_level == "sequence" else gap).exp()
    clipped = ratio > algorithm.correction_cap
    if algorithm.correction == "icepop":
        clipped = (ratio < algorithm.icepop_low) | (ratio > algorithm.icepop_high)
    return {"mean": gap.abs(), "k3": kl_estimate(tokens.rollout_logprobs, logprobs, "k3"), "clipped": clipped}
