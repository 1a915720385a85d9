"""The environment contract: a Gymnasium env whose observations are chat messages and whose actions are text."""

from __future__ import annotations

import inspect
import random
import string
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, SupportsFloat

import gymnasium
import numpy as np
from gymnasium.spaces import Space, Text

from relax_gym.errors import EnvError
from relax_gym.types import Message, Tool

ROLES = ("system", "user", "assistant", "tool")
PARTS = ("text", "image", "video", "audio")
MAX_ACTION_CHARS = 1_000_000


class StepResult(NamedTuple):
    """What `step` returns: Gymnasium's 5-tuple by name."""

    observation: list[Message]
    reward: SupportsFloat
    terminated: bool
    truncated: bool
    info: dict[str, Any]


def user(content: str | list[dict[str, Any]]) -> list[Message]:
    """One user message as an observation."""
    return [{"role": "user", "content": content}]


class ChatSpace(Space[list[Message]]):
    """Lists of chat messages. `sample()` gives one short user message."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(shape=None, dtype=None, seed=seed)

    def sample(self, mask: Any = None, probability: Any = None) -> list[Message]:
        """A random one-message observation."""
        letters = self.np_random.choice(list(string.ascii_lowercase), size=8)
        return user("".join(letters))

    def contains(self, x: Any) -> bool:
        """Whether `x` is an observation; `check_messages` says why not."""
        try:
            check_messages(x)
        except EnvError:
            return False
        return True

    @property
    def is_np_flattenable(self) -> bool:
        """Chat has no fixed-size array form."""
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ChatSpace)

    def __repr__(self) -> str:
        return "ChatSpace()"


class ActionText(Text):
    """Any text a model may write, control characters and every script included; samples are short and printable."""

    def __init__(self, max_length: int = MAX_ACTION_CHARS) -> None:
        super().__init__(max_length=max_length, min_length=0, charset=string.printable)

    def contains(self, x: Any) -> bool:
        """Whether `x` is a str that is not too long."""
        return isinstance(x, str) and len(x) <= self.max_length

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """Up to 16 printable characters."""
        size = int(self.np_random.integers(0, 17))
        return "".join(self.np_random.choice(list(string.ascii_letters + string.digits + " "), size=size))


def check_messages(observation: Any) -> None:
    """Raise EnvError saying what is wrong with an observation; do nothing when it is right."""
    if not isinstance(observation, (list, tuple)):
        raise EnvError(f"an observation is a list of messages, got {type(observation).__name__}: {observation!r:.100}")
    for index, message in enumerate(observation):
        if not isinstance(message, Mapping) or "role" not in message:
            raise EnvError(f"message {index} is {message!r:.100}; it must be a dict with 'role' and 'content'")
        if message["role"] not in ROLES:
            raise EnvError(f"message {index} has role {message['role']!r}; allowed: {', '.join(ROLES)}")
        _check_content(index, message)


def _check_content(index: int, message: Mapping[str, Any]) -> None:
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return
    if not isinstance(content, (list, tuple)):
        raise EnvError(f"message {index} has content {content!r:.100}; it must be a string or a list of parts")
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in PARTS or part.get(kind) is None:
            allowed = ", ".join(PARTS)
            raise EnvError(
                f"message {index} has part {part!r:.100}; a part is {{'type': T, T: value}} with T in {allowed}"
            )


class Env(gymnasium.Env[list[Message], str]):
    """Subclass, write `reset` and `step`. Both may be `async def`; sync ones are run off the event loop.

    Class attributes:
        tools: JSON-schema tools the chat template shows to the model.
        thread_affinity: True when every call, the constructor and `close` included, must come from one thread (browser
            drivers, session locks). For sync envs: coroutines run on the event loop.

    Optional methods: `expert_action()` says what a scripted expert would do now, `random_action()` any legal action
    (both sync or async, used by `[warmup]` and by tests); `get_state()` / `set_state(state)` make episodes resumable;
    the class method `tasks(**kwargs)` returns one `reset` options mapping for each row of a data set.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}  # type: ignore[misc]
    observation_space: Space[list[Message]] = ChatSpace()
    action_space: Space[str] = ActionText()
    tools: Sequence[Tool] = ()
    thread_affinity: bool = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        """Begin an episode: (messages, info). Same seed, options and actions give the same episode.

        Call `super().reset(seed=seed)` first: it seeds `self.np_random` and `self.rng`.
        """
        super().reset(seed=seed)
        if seed is not None or not hasattr(self, "rng"):
            self.rng = random.Random(seed if seed is not None else int(self.np_random.integers(2**31)))
        return [], {}

    def step(self, action: str) -> StepResult:
        """Take what the model said; return the messages that follow it and how it went."""
        raise EnvError(f"{type(self).__name__} does not implement step(action)")

    @classmethod
    def tasks(cls, **kwargs: Any) -> Sequence[Mapping[str, Any]] | None:
        """`reset` options for each row, when the env is backed by data; None when seeds are endless."""
        return None

    def get_state(self) -> dict[str, Any]:
        """Everything an episode needs to go on elsewhere: by default all instance attributes but the spec."""
        return {key: value for key, value in vars(self).items() if key != "spec"}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Take a state from `get_state`."""
        vars(self).update(state)


def attribute(env: gymnasium.Env[Any, Any], name: str, default: Any = None) -> Any:
    """An attribute of the env or of what it wraps: Gymnasium's own wrappers have none of the inner env's.

    Raises:
        Whatever a property raises; an AttributeError of it does not count as the attribute missing.
    """
    layer = env
    while True:
        if inspect.getattr_static(layer, name, None) is not None or hasattr(layer, name):
            return getattr(layer, name)
        if not isinstance(layer, gymnasium.Wrapper):
            return default
        layer = layer.env


def check_reset(result: Any) -> tuple[list[Message], dict[str, Any]]:
    """Validate what `reset` returned. Raises EnvError saying what is allowed."""
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], Mapping):
        raise EnvError(f"reset returned {result!r:.200}; it must return (messages, info dict)")
    check_messages(result[0])
    _check_correct("reset", result[1])
    return list(result[0]), dict(result[1])


def check_step(result: Any) -> StepResult:
    """Validate what `step` returned. Raises EnvError saying what is allowed. A NaN reward is allowed: "unscored"."""
    if not isinstance(result, tuple) or len(result) != 5:
        raise EnvError(f"step returned {result!r:.200}; it must return StepResult or Gymnasium's 5-tuple")
    observation, reward, terminated, truncated, info = result
    check_messages(observation)
    if not isinstance(reward, (int, float, np.integer, np.floating)) or isinstance(reward, bool | np.bool_):
        raise EnvError(f"step returned reward {reward!r:.100}; it must be a number")
    if not isinstance(terminated, (bool, np.bool_)) or not isinstance(truncated, (bool, np.bool_)):
        raise EnvError(f"step returned terminated={terminated!r:.50}, truncated={truncated!r:.50}; both must be bool")
    if not isinstance(info, Mapping):
        raise EnvError(f"step returned info {info!r:.100}; it must be a dict")
    _check_correct("step", info)
    return StepResult(list(observation), float(reward), bool(terminated), bool(truncated), dict(info))


def _check_correct(method: str, info: Mapping[str, Any]) -> None:
    correct = info.get("correct")
    number = isinstance(correct, (int, float, np.bool_, np.integer, np.floating))
    if correct is not None and not (number and correct in (0, 1)):
        raise EnvError(
            f"{method} returned info['correct'] = {correct!r:.100}; it must be True or False (or 1 or 0), or None "
            "where that cannot be said; partial credit belongs into the reward"
        )
