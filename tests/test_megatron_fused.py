"""What goes over memory once gives what its operations give one by one, gradients included, compiled or not."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from relax_gym_trainers.fused import _told
from relax_gym_trainers.megatron_learner.modules.mlp import gated
from relax_gym_trainers.megatron_learner.modules.norms import rms_norm
from relax_gym_trainers.megatron_learner.rope import split_and_turn

ON = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
GROUPS, QUERIES, SIZE = 2, 3, 16


def close(found: Callable[..., Sequence[Tensor]], expected: Callable[..., Sequence[Tensor]], *given: Tensor) -> None:
    """Both give the same, and the same gradients of all that is given."""
    inputs = [value.requires_grad_() for value in given]
    one, other = found(*inputs), expected(*inputs)
    torch.testing.assert_close(list(one), list(other))
    weights = [torch.randn_like(value) for value in other]
    gradients = [torch.autograd.grad(values, inputs, weights) for values in (one, other)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("device", ON)
def test_gated_linear_units(device: str) -> None:
    def by_autograd(between: Tensor) -> list[Tensor]:
        gate, up = between.chunk(2, -1)
        return [silu(gate) * up]

    for rows in (5, 8, 13):
        close(lambda x: [gated(x)], by_autograd, torch.randn(rows, 1, 12, dtype=torch.float64, device=device))


@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize("normed", [False, True])
def test_queries_keys_and_values(normed: bool, device: str) -> None:
    def one_by_one(mixed: Tensor, *norms: Tensor) -> list[Tensor]:
        query, key, value = mixed.view(len(mixed), GROUPS, QUERIES + 2, SIZE).split([QUERIES, 1, 1], 2)
        heads = [query.reshape(len(mixed), -1, SIZE), key.reshape(len(mixed), -1, SIZE)]
        if norms:
            heads = [rms_norm(each, weight, 1e-5) for each, weight in zip(heads, norms, strict=True)]
        halves = [each.chunk(2, -1) for each in heads]
        turned = [
            torch.cat((first * cosines - second * sines, second * cosines + first * sines), -1)
            for first, second in halves
        ]
        return [*turned, value.reshape(len(mixed), -1, SIZE)]

    for rows in (5, 8, 13):
        angles = torch.rand(rows, 1, SIZE // 2, dtype=torch.float64, device=device)
        cosines, sines = angles.cos(), angles.sin()
        both = torch.cat((cosines, cosines), -1), torch.cat((-sines, sines), -1)
        given = [torch.randn(rows, GROUPS * (QUERIES + 2), SIZE), *[torch.rand(SIZE)] * 2 * normed]
        given = [value.to(device, torch.float64) for value in given]
        close(lambda mixed, *norms, both=both: split_and_turn(mixed, GROUPS, *both, 1e-5, *norms), one_by_one, *given)


def test_what_cannot_be_compiled_says_where_though_torch_says_nothing() -> None:
    try:
        try:
            raise AssertionError
        except AssertionError as cause:
            raise RuntimeError("") from cause
    except RuntimeError as error:
        assert re.fullmatch(rf"AssertionError:  \({__file__}:\d+\)", _told(error))
