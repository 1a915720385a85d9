"""Divergences between the policy p and a teacher q, as log-probs over the last dimension: [..., V] → [...].

An entry of probability 0 adds nothing where it weighs nothing; where it does not, it costs at most -MIN_LOGPROB.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from relax_gym.algorithm import FloatArray
    from relax_gym.teacher import Form

MIN_LOGPROB = -1e5
"""Stands for a log-prob of -inf, so that 0 · -inf is 0."""

MIN_TAIL = 1e-8
"""Least probability outside a teacher's top K: float32 log-probs of the top tell no smaller one from 0."""

EMPTY = -30.0
"""Log-prob that a token of the top adds to the others: nearly nothing, but not nothing if there are no others."""


def divergence(logprobs: Tensor, teacher_logprobs: Tensor, form: Form, *, alpha: float = 0.5) -> Tensor:
    """D(p, q) of that name over the last dimension, [..., V] and [..., V] → [...], from log-probs of p and q.

    "reverse": Σ p (log p − log q). "forward": Σ q (log q − log p). "jsd": (1 − α) KL(p‖m) + α KL(q‖m) with
    m = (1 − α) p + α q, α = `alpha`. GKD: Agarwal et al. 2024 (arXiv:2306.13649).
    """
    if form == "reverse":
        return reverse_kl(logprobs, teacher_logprobs)
    if form == "forward":
        return forward_kl(logprobs, teacher_logprobs)
    return jsd(logprobs, teacher_logprobs, alpha=alpha)


def reverse_kl(logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """KL(p‖q) = Σ p (log p − log q): the policy leaves what the teacher would not say.

    Gu et al. 2023 (arXiv:2306.08543); on the policy's own samples: Agarwal et al. 2024, GKD (arXiv:2306.13649).
    """
    return _kl(logprobs.clamp(min=MIN_LOGPROB), teacher_logprobs.clamp(min=MIN_LOGPROB))


def forward_kl(logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """KL(q‖p) = Σ q (log q − log p): the policy covers all that the teacher might say. Source: see `reverse_kl`."""
    return reverse_kl(teacher_logprobs, logprobs)


def jsd(logprobs: Tensor, teacher_logprobs: Tensor, *, alpha: float) -> Tensor:
    """(1 − α) KL(p‖m) + α KL(q‖m) with m = (1 − α) p + α q; by convention KL(p‖q) for α = 0, KL(q‖p) for α = 1.

    The formula itself is 0 for both: near an end, divide by α or 1 − α to compare sizes. Generalised Jensen-Shannon
    divergence: Agarwal et al. 2024, GKD (arXiv:2306.13649), with β = α.
    """
    if alpha in (0, 1):
        return divergence(logprobs, teacher_logprobs, "forward" if alpha else "reverse")
    p, q = logprobs.clamp(min=MIN_LOGPROB), teacher_logprobs.clamp(min=MIN_LOGPROB)
    mixture = (p + math.log1p(-alpha)).logaddexp(q + math.log(alpha))
    return (1 - alpha) * _kl(p, mixture) + alpha * _kl(q, mixture)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)


def select_with_tail(logprobs: Tensor, ids: Tensor) -> Tensor:
    """Log-probs of the tokens `ids` [..., K] and of all others together, [..., V] → [..., K + 1].

    The last is log Σ_{v ∉ ids} p_v = log(1 − Σ_{v ∈ ids} p_v), summed over the others so that nothing cancels; it has a
    gradient to all logits. Full distributions become ones over K + 1 outcomes, between which a divergence is at most
    that between the full ones (data processing inequality: Cover & Thomas, Elements of Information Theory).
    """
    import torch

    others = logprobs.scatter(-1, ids, EMPTY).logsumexp(-1, keepdim=True)
    return torch.cat([logprobs.gather(-1, ids), others], dim=-1)


def append_tail(top_logprobs: Tensor) -> Tensor:
    """Appends log(1 − Σ_k p_k), at least log MIN_TAIL, to log-probs of the top: [..., K] → [..., K + 1].

    What `select_with_tail` computes, for a teacher that gives its K likeliest tokens and no more; without gradient in
    use. 1 − Σ p is −expm1(logsumexp) in float64: where the top is nearly everything the plain difference is rounding.
    """
    import torch

    rest = -top_logprobs.double().logsumexp(-1, keepdim=True).expm1()
    return torch.cat([top_logprobs, rest.clamp(min=MIN_TAIL).log().to(top_logprobs.dtype)], dim=-1)


def distilled_advantages(
    advantages: FloatArray, rollout_logprobs: FloatArray, teacher_logprobs: FloatArray, *, weight: float
) -> FloatArray:
    """A − weight · (ℓ_roll − log q) of each sampled token, [N] → [N]; ℓ_roll and q are constants.

    Its policy gradient is, in expectation over the token, that of `reverse_kl`. Lu 2025, "On-policy distillation",
    Thinking Machines Lab.
    """
    return advantages - weight * (rollout_logprobs - teacher_logprobs)
