"""Log-probs over a vocabulary shared among ranks: values, gradients, padding, ids never sampled, and memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from learner_cases import Largest
from megatron_modules_kit import on_quiet_ranks
from torch import Tensor

from relax_gym_trainers.megatron_learner import compat  # noqa: F401  (before megatron)
from relax_gym_trainers.megatron_learner.logprobs import vocab_parallel_logprobs
from relax_gym_trainers.megatron_learner.parallel import Layout
from relax_gym_trainers.torch_learner.logprobs import Head, _HeadLogProbs

from megatron.core import parallel_state  # isort: skip
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region  # isort: skip

TOKENS, WIDTH = 6, 5
CASES: dict[str, dict[str, Any]] = {
    "plain": {"rows": 8, "vocabulary": 8},
    "hot": {"rows": 8, "vocabulary": 8, "temperature": 1.7},
    "padded": {"rows": 8, "vocabulary": 5},
    "only padding on the last rank": {"rows": 8, "vocabulary": 4},
    "never": {"rows": 8, "vocabulary": 7, "never": [1, 6]},
    "capped": {"rows": 8, "vocabulary": 7, "softcap": 2.0, "scale": 1.5, "temperature": 0.8},
    "one chunk": {"rows": 8, "vocabulary": 8, "chunk": 16, "keep": False},
    "steep": {"rows": 8, "vocabulary": 8, "scale": 300.0},
}


def case(rows: int, **options: Any) -> tuple[list[Tensor], Tensor, dict[str, Any]]:
    """Hidden states [N, H] and a whole head [V, H], targets [N] that can be sampled, and options."""
    generator = torch.manual_seed(0)
    hidden, weight = (torch.randn(n, WIDTH, generator=generator) for n in (TOKENS, rows))
    able = [index for index in range(options["vocabulary"]) if index not in options.get("never", ())]
    targets = torch.tensor(able)[torch.randint(len(able), (TOKENS,), generator=generator)]
    return [hidden, weight], targets, {"temperature": 1.0, "chunk": 4, **options}


def gradients(scored: tuple[Tensor, Tensor], leaves: list[Tensor], factors: tuple[float, float]) -> list[Tensor]:
    """Log-probs, entropies and the gradients of a weighted sum of them."""
    weighted = torch.linspace(-1, 2, TOKENS, dtype=scored[0].dtype)
    loss = sum(factor * (weighted * value).sum() for factor, value in zip(factors, scored, strict=True) if factor)
    return [value.detach() for value in scored] + list(torch.autograd.grad(loss, leaves))


def naive(inputs: list[Tensor], targets: Tensor, factors: tuple[float, float], **options: Any) -> list[Tensor]:
    """The same in float64 from all logits of the true vocabulary."""
    hidden, weight = leaves = [x.double().requires_grad_() for x in inputs]
    logits = hidden @ weight[: options["vocabulary"]].T * options.get("scale", 1.0)
    if cap := options.get("softcap"):
        logits = cap * (logits / cap).tanh()
    logits = (logits / options["temperature"]).index_fill(1, torch.tensor(options.get("never", []), dtype=int), -1e30)
    log_p = logits.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return gradients((log_p.gather(-1, targets[:, None])[:, 0], entropy), leaves, factors)


def difference(got: list[Tensor], wanted: list[Tensor]) -> float:
    """Relative to the largest number of each, where that is above 1."""
    pairs = zip(got, wanted, strict=True)
    return max(((a.double() - b).abs().max() / b.abs().max().clamp(min=1)).item() for a, b in pairs)


@pytest.mark.parametrize("factors", [(1.0, 0.5), (1.0, 0.0), (0.0, 1.0)])
@pytest.mark.parametrize("name", CASES)
def test_one_rank_gives_what_all_logits_do(name: str, factors: tuple[float, float]) -> None:
    inputs, targets, options = case(**CASES[name])
    leaves = [x.requires_grad_() for x in inputs]
    scored = vocab_parallel_logprobs(*leaves, targets, dtype=torch.float32, **options)
    assert difference(gradients(scored, leaves, factors), naive(inputs, targets, factors, **options)) < 2e-6


def test_one_rank_gives_exactly_what_the_torch_learner_does() -> None:
    inputs, targets, options = case(**CASES["never"] | {"vocabulary": 8})
    leaves = [x.requires_grad_() for x in inputs]
    ours = vocab_parallel_logprobs(*leaves, targets, dtype=torch.float32, **options)
    head = Head(
        weight=leaves[1], bias=None, scale=1.0, softcap=None, temperature=1.0, never=torch.tensor(options["never"])
    )
    theirs = _HeadLogProbs.apply(leaves[0], leaves[1], None, targets, head, torch.float32, options["chunk"])
    pairs = zip(gradients(ours, leaves, (1.0, 0.5)), gradients(theirs, leaves, (1.0, 0.5)), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def shard(weight: Tensor, group: Any) -> Tensor:
    return weight.chunk(group.size())[group.rank()].clone()


def differences(layout: Layout) -> dict[str, float]:
    group, found = parallel_state.get_tensor_model_parallel_group(), {}
    for name, given in CASES.items():
        inputs, targets, options = case(**given)
        wanted = naive(inputs, targets, (1.0, 0.5), **options)
        wanted[3] = shard(wanted[3], group)
        leaves = [inputs[0].requires_grad_(), shard(inputs[1], group).requires_grad_()]
        scored = vocab_parallel_logprobs(*leaves, targets, group=group, dtype=torch.float32, **options)
        found[name] = difference(gradients(scored, leaves, (1.0, 0.5)), wanted)
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_share_the_vocabulary_give_what_one_does(ranks: int) -> None:
    for found in on_quiet_ranks(Layout(tp=ranks), differences):
        assert {name: value for name, value in found.items() if not value < 2e-6} == {}


def scattered(layout: Layout) -> list[Tensor]:
    """The gradient of the hidden states of this rank's tokens, which it has gathered with all others'."""
    group = parallel_state.get_tensor_model_parallel_group()
    inputs, targets, options = case(**CASES["padded"])
    mine = shard(inputs[0], group).requires_grad_()
    hidden = gather_from_sequence_parallel_region(mine, tensor_parallel_output_grad=False, group=group)
    leaves = [mine, shard(inputs[1], group).requires_grad_()]
    scored = vocab_parallel_logprobs(hidden, leaves[1], targets, group=group, dtype=torch.float32, **options)
    return gradients(scored, leaves, (1.0, 0.5))


def test_under_sequence_parallelism_each_rank_gets_the_gradient_of_its_tokens() -> None:
    inputs, targets, options = case(**CASES["padded"])
    wanted = naive(inputs, targets, (1.0, 0.5), **options)
    ranks = on_quiet_ranks(Layout(tp=2), scattered)
    joined = [ranks[0][0], ranks[0][1], *(torch.cat([rank[i] for rank in ranks]) for i in (2, 3))]
    assert difference(joined, wanted) < 2e-6


def edge_cases(layout: Layout) -> list[Any]:
    """No tokens; an id never sampled; a target that no rank has."""
    group = parallel_state.get_tensor_model_parallel_group()
    inputs, _, options = case(**CASES["never"])
    weight, options = shard(inputs[1], group).requires_grad_(), {**options, "group": group, "dtype": torch.float32}
    none = inputs[0][:0].requires_grad_()
    nothing = vocab_parallel_logprobs(none, weight, torch.empty(0, dtype=torch.int64), **options)
    (grad,) = torch.autograd.grad(nothing[0].sum() + nothing[1].sum(), weight)
    unlikely, _ = vocab_parallel_logprobs(inputs[0][:3], weight, torch.tensor([1, 7, 99]), **options)
    return [nothing[0].shape, grad.abs().sum().item(), unlikely.tolist()]


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_tokens_and_ids_that_cannot_be_sampled(ranks: int) -> None:
    for shape, gradient, unlikely in on_quiet_ranks(Layout(tp=ranks), edge_cases):
        assert (shape, gradient, unlikely) == ((0,), 0.0, [-math.inf] * 3)


def test_the_gradients_of_the_weight_are_summed_in_float32() -> None:
    """A bfloat16 sum of many chunks would stay at 256, where adding 1 changes nothing."""
    hidden = torch.zeros(512, 1, dtype=torch.bfloat16)
    weight, targets = torch.zeros(4, 1, dtype=torch.bfloat16, requires_grad=True), torch.zeros(512, dtype=torch.int64)
    hidden += 1
    options = {"temperature": 1.0, "vocabulary": 4, "chunk": 1, "dtype": torch.bfloat16}
    logprobs, _ = vocab_parallel_logprobs(hidden, weight, targets, **options)
    logprobs.sum().backward()
    assert logprobs.dtype == torch.float32
    assert weight.grad is not None and weight.grad[:, 0].tolist() == [384.0, -128.0, -128.0, -128.0]


def test_no_tensor_is_as_large_as_all_logits() -> None:
    rows, tokens, chunk = 2000, 128, 16
    hidden, weight = torch.randn(tokens, 8, requires_grad=True), torch.randn(rows, 8, requires_grad=True)
    kept: list[int] = []
    with (
        Largest() as largest,
        torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x),
    ):
        scored = vocab_parallel_logprobs(
            hidden, weight, torch.arange(tokens), temperature=1.0, vocabulary=rows, chunk=chunk, dtype=torch.float32
        )
        (scored[0].sum() + scored[1].sum()).backward()
    assert chunk * rows <= largest.elements < tokens * rows / 4
    assert max(kept) <= weight.numel()
    assert largest.bytes < 5 * chunk * rows * 4


def test_a_vocabulary_larger_than_the_head_is_refused() -> None:
    inputs, targets, options = case(rows=8, vocabulary=8)
    with pytest.raises(ValueError, match="a vocabulary of 9, but the head has 1 · 8 rows; give the"):
        vocab_parallel_logprobs(*inputs, targets, dtype=torch.float32, **{**options, "vocabulary": 9})
