"""Policy losses of single tokens. All take and give [N]; the learner weighs the tokens and sums."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def ppo_clip_loss(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Tensor:
    """max(−rA, −clip(r, 1 − clip_low, 1 + clip_high)A) for each token, [N] → [N].

    With `dual_clip` = c > 1, where A < 0 the loss is at most −cA, so a token whose ratio ran away cannot dominate.

    PPO: Schulman et al. 2017 (arXiv:1707.06347). Two clip sides: DAPO, Yu et al. 2025 (arXiv:2503.14476). Dual clip:
    Ye et al. 2020 (arXiv:1912.09729).
    """
    loss = (-ratio * advantages).maximum(-ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip is None:
        return loss
    return loss.minimum(-dual_clip * advantages).where(advantages < 0, loss)


def anchored_ratio(logprobs: Tensor, sequence_ratio: Tensor) -> Tensor:
    """sg(s) · π/sg(π): the value is the sequence's ratio s, the gradient each token's own, [N] → [N].

    GSPO-token: Zheng et al. 2025 (arXiv:2507.18071).
    """
    return sequence_ratio.detach() * (logprobs - logprobs.detach()).exp()


def sapo_loss(ratio: Tensor, advantages: Tensor, *, tau_positive: float, tau_negative: float) -> Tensor:
    """−f(r)A with f(r) = (4/τ) σ(τ(r − 1)), τ by the sign of A; at r = 1 the slope of f is 1, [N] → [N].

    SAPO: Gao et al. 2025 (arXiv:2511.20347).
    """
    positive = advantages > 0
    high = (tau_positive * (ratio - 1)).sigmoid() * (4 / tau_positive)
    low = (tau_negative * (ratio - 1)).sigmoid() * (4 / tau_negative)
    return -high.where(positive, low) * advantages


def cispo_loss(logprobs: Tensor, ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> Tensor:
    """−sg(clip(r, 1 − clip_low, 1 + clip_high)) A ℓ: clips the weight of a token, never its gradient, [N] → [N].

    CISPO: MiniMax 2025 (arXiv:2506.13585).
    """
    return -ratio.detach().clamp(1 - clip_low, 1 + clip_high) * advantages * logprobs


def reinforce_loss(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """−A ℓ, [N] → [N]. There is no ratio in it: right only where the policy trained is the one that sampled.

    REINFORCE: Williams 1992.
    """
    return -advantages * logprobs
