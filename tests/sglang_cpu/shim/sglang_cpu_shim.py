"""A plugin by SGLang's own entry point, `sglang.srt.plugins`."""

from __future__ import annotations

from typing import Any


def install() -> None:
    """Let `--enable-return-routed-experts` keep its buffers in plain memory: without a driver none can be pinned."""
    import torch

    if torch.cuda.is_available():
        return
    from sglang.srt.mem_cache.pool_host import common

    def allocate(dims: Any, dtype: Any, device: Any, *_: Any, **__: Any) -> Any:
        return torch.empty(dims, dtype=dtype, device=device)

    common.ALLOC_MEMORY_FUNCS["cpu"] = allocate
