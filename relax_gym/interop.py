"""Bridges: envs of the older three-method interface, and any Gymnasium env with discrete actions, as chat envs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
from gymnasium.spaces import Discrete

from relax_gym.env import Env, StepResult, user
from relax_gym.errors import EnvError
from relax_gym.types import Message, Tool
from relax_gym.wrappers import then


def wrap_interaction_env(env_or_factory: Any, *, tools: Sequence[Tool] = (), initial: Sequence[Message] = ()) -> Env:
    """An env of the older interface as a chat env.

    The older interface: `reset()` returns an observation, `(observation, info)` or None; `step(response)` returns
    `(observation, done, info)`; `format_observation(observation)` returns a message, a list of messages or content
    parts, or a string. All may be `async def`. The reward is `info["reward"]`, else `info["score"]`, else 0. `reset` is
    given `seed` and `options` if it takes them. `close` is optional.

    Args:
        env_or_factory: the env, or a function without arguments that builds a fresh one for every episode.
        tools: JSON-schema tools the chat template shows to the model.
        initial: messages that come before the first observation.
    """
    return InteractionEnv(env_or_factory, tools=tools, initial=initial)


class InteractionEnv(Env):
    """See `wrap_interaction_env`."""

    def __init__(self, env_or_factory: Any, *, tools: Sequence[Tool] = (), initial: Sequence[Message] = ()) -> None:
        self.tools = tools
        self.initial = tuple(initial)
        is_env = not isinstance(env_or_factory, type) and hasattr(env_or_factory, "step")
        if not is_env and not callable(env_or_factory):
            raise EnvError(f"{env_or_factory!r:.100} is neither an env with step() nor a function that builds one")
        self.inner = env_or_factory if is_env else None
        self._factory = None if is_env else env_or_factory

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin an episode; an awaitable when the wrapped env is async."""
        super().reset(seed=seed)
        if self._factory is not None:
            closed = self.close()
            self.inner = self._factory()
            return then(closed, lambda _: None) if False else self._begin(seed, options)
        return self._begin(seed, options)

    def step(self, action: str) -> Any:
        """Pass on what the model said; an awaitable when the wrapped env is async."""
        return then(self._env.step(action), self._result)

    def close(self) -> Any:
        """Close the wrapped env if it can be closed."""
        return self.inner.close() if hasattr(self.inner, "close") else None
