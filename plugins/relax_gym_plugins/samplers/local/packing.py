"""Linear layers whose weights are kept in the layout the CPU multiplies fastest in.

`torch.nn.functional.linear` puts a weight into that layout anew at each call. That costs a sixth of a call at batch 32 and
half of it at batch 8, so a sampler, which calls far more often than weights change, does it once for each version.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

SMALLEST = 2**17
ROWS_HINT = 1024


class PackedLinears:
    """Makes the large linear layers of a model on a CPU use packed weights; `refresh` after each change of weights."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = [module for module in model.modules() if _can_pack(module)]
        self.refresh()

    def refresh(self) -> None:
        """Pack the weights as they are now."""
        for layer in self._layers:
            assert isinstance(layer, nn.Linear)
            layer.forward = _packed_forward(layer)  # type: ignore[method-assign]


def _can_pack(module: nn.Module) -> bool:
    return (
        type(module) is nn.Linear
        and module.weight.device.type == "cpu"
        and module.weight.numel() >= SMALLEST
        and module.weight.dtype in (torch.float32, torch.bfloat16)
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def _packed_forward(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), ROWS_HINT)
    multiply, bias = torch.ops.mkldnn._linear_pointwise.default, layer.bias

    def forward(states: Tensor) -> Tensor:
        product: Tensor = multiply(states, packed, bias, "none", [], "")
        return product

    return forward
