"""Built-in samplers, teacher engines on servers, and trackers."""

from relax_gym.hookspecs import hookimpl
from relax_gym.registry import Component


@hookimpl
def register_samplers() -> dict[str, Component]:
    """The built-in samplers."""
    return {
        "local": Component(
            factory="relax_gym_plugins.samplers.local.sampler:LocalSampler",
            options="relax_gym_plugins.samplers.local.options:LocalSamplerOptions",
        ),
        "sglang": Component(
            factory="relax_gym_plugins.samplers.sglang.sampler:SGLangSampler",
            options="relax_gym_plugins.samplers.sglang.options:SGLangSamplerOptions",
        ),
    }


@hookimpl
def register_teachers() -> dict[str, Component]:
    """The teacher engine that is no part of a learner's process."""
    return {
        "sglang": Component(
            factory="relax_gym_plugins.teachers.sglang:SGLangTeacher",
            options="relax_gym_plugins.teachers.options:SGLangTeacherOptions",
        )
    }


@hookimpl
def register_trackers() -> dict[str, Component]:
    """The built-in trackers."""
    return {
        "tensorboard": Component(
            factory="relax_gym_plugins.trackers.tensorboard:TensorBoardTracker",
            options="relax_gym_plugins.trackers.tensorboard:TensorBoardOptions",
        )
    }
