"""RMSNorm for Megatron: values, precision, and its gradient under sequence parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron_modules_kit import on_quiet_ranks, transformer_config
from torch import Tensor

from relax_gym.errors import ConfigError
from relax_gym_trainers.megatron_learner import compat  # noqa: F401  (before megatron)
from relax_gym_trainers.megatron_learner.modules.norms import RMSNorm
from relax_gym_trainers.megatron_learner.parallel import Layout

from megatron.core import parallel_state  # isort: skip
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # isort: skip
from megatron.core.distributed import finalize_model_grads  # isort: skip

WIDTH, EPS = 6, 1e-6


def config(**options: Any) -> Any:
    return transformer_config(**{"hidden_size": WIDTH, "num_attention_heads": 2, **options})


def norm(**options: Any) -> RMSNorm:
    module = RMSNorm(config=config(**options), hidden_size=WIDTH, eps=EPS)
    with torch.no_grad():
        module.weight.copy_(torch.linspace(0.5, 1.500001, WIDTH))
    return module


def expected(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def test_it_divides_by_the_root_mean_square() -> None:
    module = norm()
    x = torch.randn(4, 2, WIDTH, generator=torch.manual_seed(0))
    torch.testing.assert_close(module(x).double(), expected(x, module.weight), rtol=1e-6, atol=1e-6)
    assert module.weight.sequence_parallel is False


def test_a_float32_weight_is_not_rounded_to_the_precision_of_the_activations() -> None:
    module = norm()
    x = torch.randn(64, WIDTH, generator=torch.manual_seed(0)).bfloat16()
    assert module(x).dtype == torch.bfloat16
    assert torch.equal(module(x), expected(x, module.weight).bfloat16())
    module(x).sum().backward()
    assert module.weight.grad is not None and module.weight.grad.dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layernorm_zero_centered_gamma": True}, "multiplies by the weight itself; add 1 to it"),
        ({"normalization": "LayerNorm"}, "normalization = 'LayerNorm', but this module is an RMSNorm"),
    ],
)
def test_other_norms_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        norm(**options)


def shared_gradient(layout: Layout) -> Tensor:
    """Each tensor-parallel rank has its half of the tokens; the gradient after Megatron has finalised it."""
    options = config(tensor_model_parallel_size=2, sequence_parallel=True)
    module = DistributedDataParallel(options, DistributedDataParallelConfig(), RMSNorm(options, WIDTH, EPS))
    module.config.finalize_model_grads_func = finalize_model_grads
    x = torch.randn(4, WIDTH, generator=torch.manual_seed(0)).chunk(2)[parallel_state.get_tensor_model_parallel_rank()]
    module.zero_grad_buffer()
    module(x).square().sum().backward()
    module.module.share_embeddings_and_output_weights = False
    finalize_model_grads([module], None)
    return module.module.weight.main_grad.clone()


def test_under_sequence_parallelism_its_gradient_is_that_of_all_tokens() -> None:
    alone = RMSNorm(config(), WIDTH, EPS)
    alone(torch.randn(4, WIDTH, generator=torch.manual_seed(0))).square().sum().backward()
    for gradient in on_quiet_ranks(Layout(tp=2), shared_gradient):
        torch.testing.assert_close(gradient, alone.weight.grad, rtol=1e-6, atol=1e-6)
