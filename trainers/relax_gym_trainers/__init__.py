"""Built-in algorithms and learners."""

from relax_gym.hookspecs import hookimpl
from relax_gym.registry import Component


@hookimpl
def register_algorithms() -> dict[str, str]:
    """The built-in algorithms."""
    return {"grpo": "relax_gym_trainers.algorithms.grpo:GRPO"}


@hookimpl
def register_learners() -> dict[str, Component]:
    """The built-in learners."""
    return {
        "torch": Component(
            factory="relax_gym_trainers.torch_learner.learner:TorchLearner",
            options="relax_gym_trainers.torch_learner.options:TorchLearnerOptions",
        )
    }
