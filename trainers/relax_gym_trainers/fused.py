"""Functions of a few elementwise operations that go over memory once, where a compiler is."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

log = logging.getLogger("relax_gym")

P = ParamSpec("P")
T = TypeVar("T")


def fused(function: Callable[P, T]) -> Callable[P, T]:
    """A function of tensors, the first of them on a GPU: compiled there, for any number of rows of the first and of
    those that have as many. As it is elsewhere, and where it cannot be compiled."""
    works = True

    @functools.cache
    def compiled() -> Callable[P, T]:
        return torch.compile(function)

    @functools.wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> T:
        nonlocal works
        first: Any = args[0]
        if not (works and first.is_cuda):
            return function(*args, **options)
        for value in args:
            if isinstance(value, Tensor) and len(value) == len(first):
                torch._dynamo.maybe_mark_dynamic(value, 0)
        try:
            return compiled()(*args, **options)
        except torch._dynamo.exc.TorchDynamoException as error:
            log.warning("%s is slow on this GPU, as it cannot be compiled: %s", function.__name__, error)
            works = False
            return function(*args, **options)

    return call
