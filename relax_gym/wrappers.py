"""Wrappers for chat envs, sync or async. Gymnasium's own work too, on sync envs."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping, Sequence
from inspect import isawaitable
from pathlib import Path
from typing import Any, ClassVar, Protocol

import gymnasium

from relax_gym.env import StepResult, check_reset, check_step
from relax_gym.types import Message

Reset = tuple[list[Message], dict[str, Any]]


def then(value: Any, continuation: Callable[[Any], Any]) -> Any:
    """`continuation(value)`, or an awaitable of it when `value` is awaitable."""
    if not isawaitable(value):
        return continuation(value)

    async def later() -> Any:
        result = continuation(await value)
        return await result if isawaitable(result) else result

    return later()


class ChatWrapper(gymnasium.Wrapper[list[Message], str, list[Message], str]):
    """Base of wrappers: override `after_reset` and `after_step`, plain functions for sync and async envs alike.

    What the wrapper does not define (`tools`, `thread_affinity`, `expert_action`, …) is the inner env's. List in
    `state_names` the attributes that change during an episode: they become part of `get_state`.
    """

    state_names: ClassVar[tuple[str, ...]] = ()

    def after_reset(self, observation: list[Message], info: dict[str, Any]) -> Reset:
        """Change what `reset` returns, or take note of it."""
        return observation, info

    def after_step(self, action: str, result: StepResult) -> StepResult:
        """Change what `step` returns, or take note of it."""
        return result

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Reset the inner env; an awaitable when the inner one gives one."""
        return then(self.env.reset(seed=seed, options=options), lambda result: self.after_reset(*check_reset(result)))

    def step(self, action: str) -> Any:
        """Step the inner env; an awaitable when the inner one gives one."""
        return then(self.env.step(action), lambda result: self.after_step(action, check_step(result)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "env":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if hasattr(type(self), name):  # a property of the wrapper raised AttributeError: the inner env has no say
            return object.__getattribute__(self, name)
        return self.env.get_wrapper_attr(name)

    @property
    def spec(self) -> Any:
        """The inner env's spec with this wrapper noted in it."""
        return super().spec

    @spec.setter
    def spec(self, value: Any) -> None:
        self.env.spec = value

    def get_state(self) -> dict[str, Any]:
        """The inner env's state and the wrapper's own."""
        own = copy.deepcopy({name: getattr(self, name) for name in self.state_names})
        return {"env": self.env.get_wrapper_attr("get_state")(), "wrapper": own}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Take a state from `get_state`."""
        self.env.get_wrapper_attr("set_state")(state["env"])
        for name, value in state["wrapper"].items():
            setattr(self, name, value)


class TimeLimit(ChatWrapper):
    """Truncates the episode after `max_turns` steps."""

    state_names = ("turns",)

    def __init__(self, env: gymnasium.Env[list[Message], str], max_turns: int) -> None:
        if max_turns < 1:
            raise ValueError(f"max_turns is {max_turns}; it must be at least 1")
        super().__init__(env)
        self.max_turns = max_turns
        self.turns = 0

    def after_reset(self, observation: list[Message], info: dict[str, Any]) -> Reset:
        """Begin to count."""
        self.turns = 0
        return observation, info

    def after_step(self, action: str, result: StepResult) -> StepResult:
        """Count, and truncate at the limit."""
        self.turns += 1
        return result._replace(truncated=result.truncated or self.turns >= self.max_turns)


class Encodes(Protocol):
    """The part of a tokenizer that counting needs."""

    def encode(self, text: str, *, add_special_tokens: bool) -> Any:
        """Something with one element for each token."""
        ...


class TokenBudget(ChatWrapper):
    """Truncates the episode once actions and observations together have `max_tokens` tokens of text.

    `counter` is a tokenizer or a function from text to a number of tokens. Template tokens and media are not counted.
    `info["tokens_used"]` says how many there are so far.
    """

    state_names = ("tokens_used",)

    def __init__(
        self, env: gymnasium.Env[list[Message], str], counter: Encodes | Callable[[str], int], max_tokens: int
    ) -> None:
        if max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens}; it must be at least 1")
        super().__init__(env)
        self.max_tokens = max_tokens
        self.tokens_used = 0
        self._counter = counter

    def after_reset(self, observation: list[Message], info: dict[str, Any]) -> Reset:
        """Begin to count."""
        self.tokens_used = self._count_messages(observation)
        return observation, {**info, "tokens_used": self.tokens_used}

    def after_step(self, action: str, result: StepResult) -> StepResult:
        """Count, and truncate when the budget is used up."""
        self.tokens_used += self._count(action) + self._count_messages(result.observation)
        truncated = result.truncated or self.tokens_used >= self.max_tokens
        return result._replace(truncated=truncated, info={**result.info, "tokens_used": self.tokens_used})

    def _count(self, text: str) -> int:
        if hasattr(self._counter, "encode"):
            return len(self._counter.encode(text, add_special_tokens=False))
        return self._counter(text)

    def _count_messages(self, messages: Sequence[Message]) -> int:
        contents = [message.get("content") or "" for message in messages]
        texts = [part.get("text", "") for content in contents if not isinstance(content, str) for part in content]
        return sum(self._count(text) for text in [*texts, *(c for c in contents if isinstance(c, str))])


class TransformReward(ChatWrapper):
    """Passes every reward through `function`."""

    def __init__(self, env: gymnasium.Env[list[Message], str], function: Callable[[float], float]) -> None:
        super().__init__(env)
        self._function = function

    def after_step(self, action: str, result: StepResult) -> StepResult:
        """Change the reward."""
        return result._replace(reward=self._function(float(result.reward)))


class SystemPrompt(ChatWrapper):
    """Puts a system message first in the conversation, in place of the env's own if it has one."""

    def __init__(self, env: gymnasium.Env[list[Message], str], text: str) -> None:
        super().__init__(env)
        self.text = text

    def after_reset(self, observation: list[Message], info: dict[str, Any]) -> Reset:
        """Put the system message there."""
        rest = observation[1:] if observation and observation[0]["role"] == "system" else observation
        return [{"role": "system", "content": self.text}, *rest], info


class RecordEpisode(ChatWrapper):
    """Appends one line of JSON to `folder`/episodes.jsonl for every episode; media are only described.

    An episode is written when it ends, or unfinished when `reset` or `close` comes first. Keys: `env_id`, `episode`
    (how many this wrapper wrote before), `seed`, `options`, `messages` (actions as assistant messages), `actions`,
    `rewards` (null for one that is not finite), `return`, `terminated`, `truncated`.
    """

    state_names = ("_line", "_episodes")

    def __init__(self, env: gymnasium.Env[list[Message], str], folder: str | Path) -> None:
        super().__init__(env)
        self.path = Path(folder) / "episodes.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._line: dict[str, Any] | None = None
        self._episodes = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Write down an unfinished episode and begin the next."""
        self._write()
        self._line = {"seed": seed, "options": options}
        return super().reset(seed=seed, options=options)

    def after_reset(self, observation: list[Message], info: dict[str, Any]) -> Reset:
        """Begin a line."""
        env_id = self.spec.id if self.spec else type(self.unwrapped).__name__
        self._line = {
            "env_id": env_id,
            "episode": self._episodes,
            **(self._line or {}),
            "messages": [_described(message) for message in observation],
            "actions": [],
            "rewards": [],
            "terminated": False,
            "truncated": False,
        }
        return observation, info

    def after_step(self, action: str, result: StepResult) -> StepResult:
        """Add the turn; write the line when the episode is over."""
        line = self._line
        if line is None:  # stepped on after the end: nothing that belongs to an episode
            return result
        line["messages"] += [{"role": "assistant", "content": action}, *map(_described, result.observation)]
        line["actions"].append(action)
        line["rewards"].append(result.reward if math.isfinite(result.reward) else None)
        line["terminated"], line["truncated"] = result.terminated, result.truncated
        if result.terminated or result.truncated:
            self._write()
        return result

    def close(self) -> Any:
        """Write down an unfinished episode and close the inner env."""
        self._write()
        return super().close()

    def _write(self) -> None:
        line, self._line = self._line, None
        if line is None or "messages" not in line:
            return
        self._episodes += 1
        total = None if None in line["rewards"] else sum(line["rewards"])
        text = json.dumps({**line, "return": total}, default=str) + "\n"
        with self.path.open("ab", buffering=0) as file:  # one write: lines of several envs do not mix
            file.write(text.encode())


def _described(message: Message) -> Message:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return dict(message)
    return {**message, "content": [_described_part(part) for part in content]}


def _described_part(part: Mapping[str, Any]) -> dict[str, Any]:
    kind = part["type"]
    value = part[kind]
    if kind == "text":
        return dict(part)
    if isinstance(value, str | Path):
        source = str(value)
        return {"type": kind, kind: source if len(source) <= 200 else f"{source[:60]}… ({len(source)} characters)"}
    size = getattr(value, "shape", None) or getattr(value, "size", None)
    if size is None and hasattr(value, "__len__"):
        size = len(value)
    return {"type": kind, kind: f"<{type(value).__name__} {size}>"}
