"""What costs time on a GPU when it is written as on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(values: NDArray[Any] | Tensor, device: torch.device) -> Tensor:
    """The values on a device. Waits neither for it nor for what it still does, as a copy of ordinary memory would."""
    tensor = values if isinstance(values, Tensor) else torch.from_numpy(values)
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def download(value: Tensor) -> Callable[[], Tensor]:
    """Begins to bring a value to host memory. What is returned gives it, and waits for what the device had to do until
    now, not for what it is told to do later."""
    if not value.is_cuda:
        return lambda: value
    here = torch.empty_like(value, device="cpu", pin_memory=True)
    here.copy_(value, non_blocking=True)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()

    def arrived() -> Tensor:
        done.synchronize()
        return here

    return arrived


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total [n, m] += left [n, k] @ right [k, m]. The sum is in the precision of `total`, which may be float32 where
    the factors' is lower; a GPU then rounds no product to theirs, nor needs memory for it."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right
