"""The weights that a policy had, beside those it has."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import Tensor
from torch.nn import Parameter


class Reference:
    """Frozen values of some parameters. All others of their model never change."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        """Nothing is frozen yet."""
        self.values: list[Tensor] = []
        self._parameters = parameters

    def take(self) -> None:
        """Freeze the parameters as they are."""
        self.values = [parameter.detach().clone() for parameter in self._parameters]

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """The model computes with the frozen values."""
        current = [parameter.data for parameter in self._parameters]
        for parameter, value in zip(self._parameters, self.values, strict=True):
            parameter.data = value
        try:
            yield
        finally:
            for parameter, value in zip(self._parameters, current, strict=True):
                parameter.data = value
