"""Which way weights go to the servers, and in which precision."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig

from relax_gym.context import RunContext
from relax_gym_plugins.samplers.sglang.options import SGLangSamplerOptions
from relax_gym_plugins.samplers.sglang.weights.base import WeightSender
from relax_gym_plugins.samplers.sglang.weights.broadcast import BroadcastSender
from relax_gym_plugins.samplers.sglang.weights.disk import DiskSender
from relax_gym_plugins.samplers.sglang.weights.ipc import IpcSender


def build_sender(options: SGLangSamplerOptions, context: RunContext, dtype: torch.dtype | None) -> WeightSender:
    """What `sampler.sync` names; "auto" is ipc for launched servers, and disk for attached ones and for several copies
    of the model behind one URL."""
    timeout, several = options.update_timeout, int(options.server_args.get("dp_size", 1)) > 1
    sync = options.sync if options.sync != "auto" else "disk" if options.urls or several else "ipc"
    if sync == "disk":
        return DiskSender(context.run_dir / "weights", context.model_path, dtype=dtype, timeout=timeout)
    if sync == "ipc":
        return IpcSender(dtype=dtype, timeout=timeout)
    return BroadcastSender("nccl" if torch.cuda.is_available() else "gloo", dtype=dtype, timeout=timeout)


def servers_dtype(options: SGLangSamplerOptions, model: PretrainedConfig) -> torch.dtype | None:
    """What launched servers compute in, so that no more bytes travel than they keep; None where it is not known."""
    if options.urls:
        return None
    name = options.server_args.get("dtype", "auto")
    if name == "auto":
        # SGLang takes the model's own, and half of it where that is float32.
        return torch.bfloat16 if model.dtype is torch.bfloat16 else None
    found = getattr(torch, {"half": "float16", "float": "float32"}.get(str(name), str(name)), None)
    return found if isinstance(found, torch.dtype) else None
