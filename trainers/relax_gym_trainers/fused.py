"""Functions of a few elementwise operations that go over memory once, where a compiler is."""

from __future__ import annotations

import functools
import logging
import traceback
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

log = logging.getLogger("relax_gym")

P = ParamSpec("P")
T = TypeVar("T")


def fused(function: Callable[P, T]) -> Callable[P, T]:
    """A function of tensors, the first of them on a GPU: compiled there, for any number of rows of the first and of
    those that have as many. As it is elsewhere, where it cannot be compiled, and for a lone row, for which a compiler
    would begin again, in the middle of a run."""
    works = True
    kinds: set[tuple[Any, ...]] = set()  # of arguments that it was compiled for

    @functools.cache
    def compiled() -> Callable[P, T]:
        return torch.compile(function)

    @functools.wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> T:
        nonlocal works
        first: Any = args[0]
        if not (works and first.is_cuda and len(first) > 1):
            return function(*args, **options)
        if (kind := _kind(args)) not in kinds:
            kinds.add(kind)
            for value in args:
                if isinstance(value, Tensor) and len(value) == len(first):
                    torch._dynamo.maybe_mark_dynamic(value, 0)
        try:
            return compiled()(*args, **options)
        except torch._dynamo.exc.TorchDynamoException as error:
            log.warning("%s is slow on this GPU, as it cannot be compiled: %s", function.__name__, _told(error))
            works = False
            return function(*args, **options)

    return call


def _told(error: BaseException) -> str:
    """What was raised first, and where: torch's own message may be empty."""
    while error.__cause__ is not None:
        error = error.__cause__
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"


def _kind(args: Sequence[Any]) -> tuple[Any, ...]:
    """What decides whether a function is compiled again, but for the number of rows. To mark those of every call takes
    as long as the call."""
    return torch.is_grad_enabled(), *(
        (arg.dtype, arg.shape[1:], arg.requires_grad) if isinstance(arg, Tensor) else arg for arg in args
    )
