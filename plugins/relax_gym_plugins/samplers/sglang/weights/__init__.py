"""Ways to bring the learner's weights into SGLang servers: by disk, by memory that is shared, by broadcast."""

from relax_gym_plugins.samplers.sglang.weights.base import Failures, Server, WeightSender
from relax_gym_plugins.samplers.sglang.weights.broadcast import BroadcastSender
from relax_gym_plugins.samplers.sglang.weights.checksums import Checked
from relax_gym_plugins.samplers.sglang.weights.disk import DiskSender
from relax_gym_plugins.samplers.sglang.weights.ipc import IpcSender
from relax_gym_plugins.samplers.sglang.weights.names import checkpoint_names

__all__ = [
    "BroadcastSender",
    "Checked",
    "DiskSender",
    "Failures",
    "IpcSender",
    "Server",
    "WeightSender",
    "checkpoint_names",
]
