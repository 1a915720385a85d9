"""Which way weights go."""

from __future__ import annotations

from relax_gym.context import RunContext
from relax_gym_plugins.samplers.sglang.options import SGLangSamplerOptions
from relax_gym_plugins.samplers.sglang.weights.base import WeightSender


def build_sender(options: SGLangSamplerOptions, context: RunContext) -> WeightSender:
    """What `sampler.sync` names; "auto" is ipc for launched servers and disk for attached ones."""
    match options.sync:
        case "ipc":
            from relax_gym_plugins.samplers.sglang.weights.ipc import IpcSender

            return IpcSender(timeout=options.update_timeout)
        case _:
            from relax_gym_plugins.samplers.sglang.weights.disk import DiskSender

            return DiskSender(context.run_dir / "weights", context.model_path, timeout=options.update_timeout)
