"""Bridges: envs of the older three-method interface, and any Gymnasium env with discrete actions, as chat envs."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
from gymnasium.envs.registration import load_env_creator
from gymnasium.spaces import Discrete

from relax_gym.env import Env, StepResult, user
from relax_gym.errors import EnvError
from relax_gym.types import Message, Tool
from relax_gym.wrappers import then


def wrap_interaction_env(env_or_factory: Any, *, tools: Sequence[Tool] = (), initial: Sequence[Message] = ()) -> Env:
    """An env of the older interface as a chat env.

    The older interface: `reset()` returns an observation, `(observation, info)` or None; `step(response)` returns
    `(observation, done, info)`; `format_observation(observation)` returns a message, a list of messages or of content
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
        is_env = hasattr(env_or_factory, "step") and not isinstance(env_or_factory, type)
        if not is_env and not callable(env_or_factory):
            raise EnvError(f"{env_or_factory!r:.100} is neither an env with step() nor a function that builds one")
        self.inner = env_or_factory if is_env else None
        self._factory = None if is_env else env_or_factory

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin an episode; an awaitable when the wrapped env is async."""
        super().reset(seed=seed)
        renewed = None if self._factory is None else then(self.close(), self._build)
        return then(renewed, lambda _: then(self._reset_inner(seed=seed, options=options), self._begin))

    def step(self, action: str) -> Any:
        """Pass on what the model said; an awaitable when the wrapped env is async."""
        if self.inner is None:
            raise EnvError("step() came before reset(), which builds the env")
        return then(self.inner.step(action), self._go_on)

    def close(self) -> Any:
        """Close the wrapped env if it can be closed."""
        close = getattr(self.inner, "close", None)
        return None if close is None else close()

    def _build(self, _: Any) -> None:
        assert self._factory is not None
        self.inner = self._factory()

    def _reset_inner(self, **arguments: Any) -> Any:
        reset = self.inner.reset  # type: ignore[union-attr]
        accepted = inspect.signature(reset).parameters.values()
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted)
        names = {parameter.name for parameter in accepted}
        return reset(**{name: value for name, value in arguments.items() if takes_any or name in names})

    def _begin(self, result: Any) -> Any:
        pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)
        observation, info = result if pair else (result, {})
        return then(self._format(observation), lambda messages: ([*self.initial, *messages], dict(info)))

    def _go_on(self, result: Any) -> Any:
        if not isinstance(result, tuple) or len(result) != 3 or not isinstance(result[2], Mapping | None):
            raise EnvError(f"step returned {result!r:.200}; an env of this interface returns (observation, done, info)")
        observation, done, info = result[0], bool(result[1]), dict(result[2] or {})
        reward = info.get("reward", info.get("score", 0.0))
        reward = 0.0 if reward is None else float(reward)
        return then(self._format(observation), lambda messages: StepResult(messages, reward, done, False, info))

    def _format(self, observation: Any) -> Any:
        if observation is None:
            return []
        format_observation = getattr(self.inner, "format_observation", None)
        formatted = observation if format_observation is None else format_observation(observation)
        return then(formatted, _as_messages)


def _as_messages(formatted: Any) -> list[Message]:
    if formatted is None or formatted == "" or formatted == []:
        return []
    if isinstance(formatted, str):
        return user(formatted)
    if isinstance(formatted, Mapping):
        return [dict(formatted)]
    if isinstance(formatted, list) and all(isinstance(item, Mapping) for item in formatted):
        return user(formatted) if "role" not in formatted[0] else formatted
    raise EnvError(
        f"format_observation returned {formatted!r:.200}; it must return a message, a list of them or a string"
    )


class GymnasiumTextEnv(Env):
    """Any Gymnasium env with `Discrete` actions, played in words.

    The model names an action or gives its number; the last one it mentions counts. An answer without a legal action is
    answered with the list of actions and does not step the game.

    Args:
        env_id: id of a Gymnasium env, `module:id` if a module must be imported for it.
        actions: a name for each action, in order; by default their numbers.
        intro: what the model is told first; by default the env's id and its actions.
        parse: text → action, or None when there is none in it.
        render: (observation, game) → text; by default the game's "ansi" rendering, else the observation.
        kwargs: passed to `gymnasium.make`.
    """

    def __init__(
        self,
        env_id: str,
        *,
        actions: Sequence[str] | None = None,
        intro: str | None = None,
        parse: Callable[[str], int | None] | None = None,
        render: Callable[[Any, gymnasium.Env[Any, Any]], str] | None = None,
        **kwargs: Any,
    ) -> None:
        self.game = _make_game(env_id, kwargs)
        space = self.game.action_space
        if not isinstance(space, Discrete):
            raise EnvError(f"{env_id} has {type(space).__name__} actions; only Discrete ones can be named in words")
        self._first = int(space.start)
        self.actions = tuple(actions) if actions is not None else tuple(str(self._first + i) for i in range(space.n))
        if len(self.actions) != space.n:
            raise EnvError(f"{len(self.actions)} action names for {env_id}, which has {space.n} actions")
        self.intro = intro or f"You are playing {env_id}."
        self._parse = parse
        self._render = render or _render

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        """Begin a game."""
        super().reset(seed=seed)
        observation, info = self.game.reset(seed=seed, options=options)
        return user(f"{self.intro} {self._choices()}\n\n{self._render(observation, self.game)}"), info

    def step(self, action: str) -> StepResult:
        """Play the action the text names."""
        number = self._find_action(action) if self._parse is None else self._parse(action)
        if number is None or not self.game.action_space.contains(number):
            return StepResult(
                user(f"That is not a legal action. {self._choices()}"), 0.0, False, False, {"legal": False}
            )
        observation, reward, terminated, truncated, info = self.game.step(number)
        text = self._render(observation, self.game)
        return StepResult(user(text), reward, terminated, truncated, {**info, "legal": True})

    def random_action(self) -> str:
        """Any action's name."""
        return self.rng.choice(self.actions)

    def close(self) -> None:
        """Close the game."""
        self.game.close()

    def _choices(self) -> str:
        numbers = range(self._first, self._first + len(self.actions))
        listed = (name if name == str(i) else f"{i} ({name})" for i, name in zip(numbers, self.actions, strict=True))
        return f"Answer with one action: {', '.join(listed)}."

    def _find_action(self, text: str) -> int | None:
        known = {name.lower(): self._first + index for index, name in enumerate(self.actions)}
        known |= {str(number): number for number in list(known.values())}
        words = "|".join(re.escape(name) for name in sorted(known, key=len, reverse=True))
        found = re.findall(rf"(?<![\w.-])(?:{words})(?![\w-]|\.\d)", text.lower())
        return known[found[-1]] if found else None


def _make_game(env_id: str, kwargs: Mapping[str, Any]) -> gymnasium.Env[Any, Any]:
    module, _, name = env_id.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        spec = gymnasium.spec(name)
    except (ImportError, gymnasium.error.Error) as error:
        raise EnvError(f"Gymnasium has no env {env_id!r}: {error}") from error
    if spec.entry_point is None:
        raise EnvError(f"Gymnasium's env {env_id!r} has no entry point, so it cannot be built")
    creator = load_env_creator(spec.entry_point) if isinstance(spec.entry_point, str) else spec.entry_point
    modes = getattr(creator, "metadata", {}).get("render_modes", [])
    ansi = {"render_mode": "ansi"} if "ansi" in modes else {}
    return gymnasium.make(name, **{**ansi, **kwargs})


def _render(observation: Any, game: gymnasium.Env[Any, Any]) -> str:
    if game.render_mode != "ansi":
        return f"Observation: {observation}"
    marked = re.sub(r"\x1b\[\d+m(.)\x1b\[0m", r"[\1]", str(game.render()))  # a highlighted cell is where the player is
    return re.sub(r"\x1b\[[\d;]*m", "", marked).strip("\n")
