"""Linear layers whose weights are kept in the layout that the CPU multiplies fastest in.

`torch.nn.functional.linear` puts a weight into that layout anew at each call. That is a sixth of a call at batch 32 and
half of it at batch 8. A sampler calls far more often than weights change, so it does it once for each version, at the
price of a second copy of these weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

SMALLEST = 2**17
ROWS_HINT = 1024


class PackedLinears:
    """Makes the large linear layers of a model on a CPU use packed weights; `refresh` after each change of weights."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = [module for module in model.modules() if isinstance(module, nn.Linear) and _can_pack(module)]
        self.refresh()

    def refresh(self) -> None:
        """Pack the weights as they are now."""
        for layer in self._layers:
            packed = _pack(layer.weight.detach())
            layer.forward = functools.partial(_multiply, packed, layer.bias)  # type: ignore[method-assign]


def _can_pack(layer: nn.Linear) -> bool:
    weight = layer.weight
    # A subclass may compute something else than a plain product.
    return type(layer) is nn.Linear and weight.numel() >= SMALLEST and _works(weight.device.type, weight.dtype)


@functools.cache
def _works(device: str, dtype: torch.dtype) -> bool:
    """Whether this build of torch, on this machine, multiplies packed weights of a type, and rightly."""
    if device != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return False
    states, weight = torch.eye(8, dtype=dtype), torch.arange(64, dtype=dtype).view(8, 8)
    try:
        return torch.equal(_multiply(_pack(weight), None, states), weight.T)
    except (AttributeError, RuntimeError):
        return False


def _pack(weight: Tensor) -> Tensor:
    pack: Callable[[Tensor, int], Tensor] = torch.ops.mkldnn._reorder_linear_weight
    return pack(weight, ROWS_HINT)


def _multiply(packed: Tensor, bias: Tensor | None, states: Tensor) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(states, packed, bias, "none", [], "")
    return product
