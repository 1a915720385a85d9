"""What optimizers keep, in host memory except while they step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from relax_gym_trainers.reference import on_host, settle


class HostState:
    """Moments, and float32 copies of weights where an optimizer has them."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], modules: Sequence[torch.nn.Module]) -> None:
        """From now on it is in host memory. The weights of `modules` stay where they are, and so do views of them."""
        weights = [parameter for module in modules for parameter in module.parameters()]
        stay = {weight.untyped_storage().data_ptr() for weight in weights}
        stepped = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        self._optimizers, self._device = optimizers, weights[0].device
        self._copies = [p for p in stepped if p.untyped_storage().data_ptr() not in stay]
        self.leave()

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """The optimizers can step."""
        for copy in self._copies:
            copy.data = copy.data.to(self._device, non_blocking=True)
        for state, name in self._moments():
            state[name] = state[name].to(self._device, non_blocking=True)
        try:
            yield
        finally:
            self.leave()

    def leave(self) -> None:
        """What is on the device goes to host memory."""
        for copy in self._copies:
            copy.data = self._away(copy.data)
        for state, name in self._moments():
            state[name] = self._away(state[name])
        settle([self._device])

    def _away(self, tensor: Tensor) -> Tensor:
        return on_host(tensor) if tensor.device == self._device else tensor

    def _moments(self) -> list[tuple[dict[str, Any], str]]:
        """Where they are found. The count of steps, a scalar, stays where its optimizer wants it."""
        states = [state for optimizer in self._optimizers for state in optimizer.state.values()]
        return [(state, name) for state in states for name, value in state.items() if getattr(value, "ndim", 0)]
