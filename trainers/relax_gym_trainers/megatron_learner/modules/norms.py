"""RMSNorm on torch, also under sequence parallelism, which megatron-core's own torch norm refuses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from relax_gym.errors import ConfigError
from relax_gym_trainers.fused import fused


class RMSNorm(torch.nn.RMSNorm):
    """x / sqrt(mean(x²) + eps) · weight over the last dimension: layer norms [.., hidden], q/k norms [.., head].

    The weight keeps its own precision: a float32 one multiplies bfloat16 activations in float32, and the result has the
    activations' precision.

    Args:
        config: Megatron's `TransformerConfig`. With its `sequence_parallel` a rank sees only its tokens, or its heads,
            so the weight is marked for Megatron to sum its gradient over the tensor-parallel ranks.
        hidden_size: Length of the last dimension.

    Raises:
        ConfigError: zero-centred weights (1 + weight) are asked for, or another norm than RMSNorm.
    """

    def __init__(
        self,
        config: Any,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = False,
        zero_centered_gamma: bool = False,
        normalization: str = "RMSNorm",
    ) -> None:
        super().__init__(hidden_size, eps=eps)
        if zero_centered_gamma or config.layernorm_zero_centered_gamma:
            raise ConfigError(
                "layernorm_zero_centered_gamma: this RMSNorm multiplies by the weight itself; add 1 to it"
            )
        if {normalization, config.normalization} != {"RMSNorm"}:
            raise ConfigError(f"normalization = {config.normalization!r}, but this module is an RMSNorm; use another")
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return _rms_norm(x.reshape(-1, x.shape[-1]), self.weight, self.eps or 0.0).view(x.shape)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x over its last dimension, normed and multiplied by the weight, [size]. Written out for the compiler: torch's own
    backward pass takes longer than the attention's where that dimension is short, as heads are."""
    exact = x.to(torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32))
    normed = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)
    return (normed * weight).to(x.dtype)


_rms_norm = fused(rms_norm)
