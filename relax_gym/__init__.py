"""Agentic reinforcement learning of language models, environment first.

Importing this package imports neither torch nor transformers: public names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from relax_gym import registry as _registry

__version__ = "0.1.0"

_HOME = {
    "Algorithm": "algorithm",
    "TrainedTokens": "algorithm",
    "ActionText": "env",
    "ChatSpace": "env",
    "Env": "env",
    "StepResult": "env",
    "user": "env",
    "RelaxGymError": "errors",
    "hookimpl": "hookspecs",
    "wrap_interaction_env": "interop",
    "Learner": "learner",
    "Component": "registry",
    "EnvSpec": "registry",
    "list": "registry:list_envs",
    "make": "registry",
    "register": "registry",
    "spec": "registry",
    "Reward": "reward",
    "Sampler": "sampler",
    "SamplingParams": "sampler",
    "ToolEnv": "tools",
    "Batch": "types",
    "Completion": "types",
    "FinishReason": "types",
    "Message": "types",
    "StopReason": "types",
    "Task": "types",
    "TrainingSample": "types",
    "Trajectory": "types",
    "Turn": "types",
    "RecordEpisode": "wrappers",
    "TimeLimit": "wrappers",
    "TokenBudget": "wrappers",
}

__all__ = sorted(_HOME.keys() - {"list"})

if TYPE_CHECKING:
    from relax_gym.algorithm import Algorithm as Algorithm
    from relax_gym.algorithm import TrainedTokens as TrainedTokens
    from relax_gym.env import ActionText as ActionText
    from relax_gym.env import ChatSpace as ChatSpace
    from relax_gym.env import Env as Env
    from relax_gym.env import StepResult as StepResult
    from relax_gym.env import user as user
    from relax_gym.errors import RelaxGymError as RelaxGymError
    from relax_gym.hookspecs import hookimpl as hookimpl
    from relax_gym.interop import wrap_interaction_env as wrap_interaction_env
    from relax_gym.learner import Learner as Learner
    from relax_gym.registry import Component as Component
    from relax_gym.registry import EnvSpec as EnvSpec
    from relax_gym.registry import make as make
    from relax_gym.registry import register as register
    from relax_gym.registry import spec as spec
    from relax_gym.reward import Reward as Reward
    from relax_gym.sampler import Sampler as Sampler
    from relax_gym.sampler import SamplingParams as SamplingParams
    from relax_gym.tools import ToolEnv as ToolEnv
    from relax_gym.types import Batch as Batch
    from relax_gym.types import Completion as Completion
    from relax_gym.types import FinishReason as FinishReason
    from relax_gym.types import Message as Message
    from relax_gym.types import StopReason as StopReason
    from relax_gym.types import Task as Task
    from relax_gym.types import TrainingSample as TrainingSample
    from relax_gym.types import Trajectory as Trajectory
    from relax_gym.types import Turn as Turn
    from relax_gym.wrappers import RecordEpisode as RecordEpisode
    from relax_gym.wrappers import TimeLimit as TimeLimit
    from relax_gym.wrappers import TokenBudget as TokenBudget


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'relax_gym' has no attribute {name!r}")
    module, _, attribute = _HOME[name].partition(":")
    return getattr(importlib.import_module(f"relax_gym.{module}"), attribute or name)


_registry.add_built_in_to_gymnasium()  # `import relax_gym` is enough for `gymnasium.make("relax_gym/...")`


def __dir__() -> Iterable[str]:
    return [*globals(), *_HOME]
