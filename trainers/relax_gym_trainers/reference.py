"""The weights that a policy had, beside those it has; and weights that are on their device only while they are used."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter


class Reference:
    """Frozen values of some parameters. All others of their model never change.

    What swaps them is each parameter's `data`: whoever has a view of a parameter's memory (an optimizer, the buffers
    of data parallelism) keeps that of the values of now, which come back as they were.
    """

    def __init__(self, parameters: Sequence[Parameter], *, offload: bool = False) -> None:
        """Nothing is frozen yet. `offload` keeps frozen values in host memory, pinned where there is a GPU."""
        self.values: list[Tensor] = []
        self._parameters = parameters
        self._offload = offload
        self._devices = [parameter.device for parameter in parameters]

    def take(self) -> None:
        """Freeze the parameters as they are."""
        copy = on_host if self._offload else torch.clone
        self._devices = [parameter.device for parameter in self._parameters]
        self.values = [copy(parameter.detach()) for parameter in self._parameters]
        settle(self._devices)

    def stay_out(self) -> None:
        """The parameters take the place of the frozen values: outside of `inside` they are where these are."""
        for parameter, value in zip(self._parameters, self.values, strict=True):
            parameter.data = value

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """The model computes with the frozen values, on the parameters' own devices."""
        current = [parameter.data for parameter in self._parameters]
        try:
            for parameter, value, device in zip(self._parameters, self.values, self._devices, strict=True):
                # Kernels that read them follow on the same stream, and so does what their memory is used for next.
                parameter.data = value.to(device, non_blocking=True)
            yield
        finally:
            for parameter, value in zip(self._parameters, current, strict=True):
                parameter.data = value


def on_host(tensor: Tensor) -> Tensor:
    """A copy in host memory; there before `settle` returns."""
    return room_on_host(tensor).copy_(tensor, non_blocking=True)


def room_on_host(tensor: Tensor) -> Tensor:
    """Host memory for it, pinned if it is on a GPU."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)


def settle(devices: Sequence[torch.device]) -> None:
    """Wait until what was copied from these devices is in host memory."""
    for device in {device for device in devices if device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()
