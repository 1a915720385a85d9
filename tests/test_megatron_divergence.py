"""Divergence over a vocabulary shared among ranks: what one process computes from all logits, and its gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron_modules_kit import on_quiet_ranks
from torch import Tensor

from relax_gym_trainers.functional import forward_kl, reverse_kl, select_with_tail
from relax_gym_trainers.functional.distillation import jsd
from relax_gym_trainers.megatron_learner.divergence import (
    SharedTop,
    SharedVocabulary,
    shared_head,
    vocab_parallel_divergence,
)
from relax_gym_trainers.megatron_learner.parallel import Layout

from megatron.core import parallel_state  # isort: skip

TOKENS, ROWS, VOCABULARY, NEVER, TEMPERATURE = 6, 8, 7, [2], 1.3
FORMS = {"reverse": reverse_kl, "forward": forward_kl, "jsd": lambda p, q: jsd(p, q, alpha=0.3)}


def inputs() -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Hidden states and head of the policy, of the teacher (wider), and tokens."""
    generator = torch.manual_seed(0)
    policy = [torch.randn(n, 5, generator=generator) for n in (TOKENS, ROWS)]
    teacher = [torch.randn(n, 9, generator=generator) for n in (TOKENS, ROWS)]
    return policy, teacher, torch.tensor([0, 1, 3, 4, 5, 6])


def log_probs(hidden: Tensor, weight: Tensor) -> Tensor:
    logits = (hidden @ weight[:VOCABULARY].T) / TEMPERATURE
    return logits.index_fill(1, torch.tensor(NEVER), -1e30).log_softmax(-1)


def expected(form: Any, top: int | None) -> list[Tensor]:
    """Divergence, the teacher's log-probs and the gradients, in float64 from all logits."""
    policy, teacher, targets = inputs()
    leaves = [x.double().requires_grad_() for x in policy]
    log_p, log_q = log_probs(*leaves), log_probs(*(x.double() for x in teacher))
    sampled = log_q.gather(-1, targets[:, None])[:, 0]
    if top is not None:
        ids = log_q.topk(top).indices
        log_p, log_q = select_with_tail(log_p, ids), select_with_tail(log_q, ids)
    value = form(log_p, log_q)
    return [value.detach(), sampled, *torch.autograd.grad(value @ torch.linspace(1, 2, TOKENS).double(), leaves)]


def got(layout: Layout, name: str, top: int | None) -> list[Tensor]:
    group = parallel_state.get_tensor_model_parallel_group()
    policy, teacher, targets = inputs()
    own = [weight.chunk(group.size())[group.rank()] for weight in (policy[1], teacher[1])]
    options = {"group": group, "temperature": TEMPERATURE, "vocabulary": VOCABULARY, "never": NEVER}
    hidden, weight = policy[0].requires_grad_(), own[0].clone().requires_grad_()
    common = {"group": group, "form": FORMS[name]}
    if top is None:
        target: Any = SharedVocabulary(
            features=teacher[0], targets=targets, head=shared_head(own[1], **options), dtype=torch.float32, **common
        )
    else:
        log_q = log_probs(*teacher)
        ids = log_q.topk(top).indices
        sampled = log_q.gather(-1, targets[:, None])[:, 0]
        target = SharedTop(ids=ids, top=select_with_tail(log_q, ids), logprobs=sampled, **common)
    settings = {"group": group, "chunk": 4, "dtype": torch.float32}
    value, sampled = vocab_parallel_divergence(hidden, shared_head(weight, **options), target, **settings)
    assert not sampled.requires_grad
    grads = torch.autograd.grad(value @ torch.linspace(1, 2, TOKENS), [hidden, weight])
    return [value.detach(), sampled, *grads]


def all_forms(layout: Layout) -> dict[tuple[str, int | None], list[Tensor]]:
    return {(name, top): got(layout, name, top) for name in FORMS for top in (None, 3)}


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_that_share_the_vocabulary_compare_as_one_does(ranks: int) -> None:
    found = on_quiet_ranks(Layout(tp=ranks), all_forms)
    for name, top in found[0]:
        ours = [rank[name, top] for rank in found]
        whole = [*ours[0][:3], torch.cat([parts[3] for parts in ours])]
        for a, b in zip(whole, expected(FORMS[name], top), strict=True):
            torch.testing.assert_close(a.double(), b, rtol=3e-6, atol=3e-6)
        for parts in ours:
            assert all(torch.equal(a, b) for a, b in zip(parts[:2], ours[0][:2], strict=True))
