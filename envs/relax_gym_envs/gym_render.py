"""Any Gymnasium env with pictures and a few actions, played by what is seen."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import PIL.Image
from numpy.typing import NDArray

from relax_gym import Env, Message, StepResult, user
from relax_gym.errors import ConfigError
from relax_gym_envs._quiz import Part, option_named
from relax_gym_envs._text import check_range

KNOWN = {
    "FrozenLake": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "CartPole": ("left", "right"),
    "MountainCar": ("left", "nothing", "right"),
    "Blackjack": ("stick", "hit"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
    "MiniGrid": ("left", "right", "forward", "pickup", "drop", "toggle", "done"),
}
"""Names of the actions of well-known envs, by the beginning of their ids."""


class GymRender(Env):
    """A bridge: the model sees what `render` draws and says the name of an action.

    Args:
        env_id: id of a Gymnasium env that renders "rgb_array" and has a `Discrete` action space. `module:id` imports
            the module that registers it: `minigrid:MiniGrid-Empty-5x5-v0`.
        env_kwargs: arguments of `gymnasium.make`.
        actions: a name for each action; by default those of well-known envs, else their numbers.
        task: what the model is told to do.
        frame_size: pixels of the longer side of a picture, at least 8; larger ones are scaled down. None leaves them.
        frames: 1 shows a picture; with more, an action is repeated so many times and a video of that is shown.
        fps: frames per second of that video, 0.1 to 1000, by default what the env says.

    The reward is the sum of the env's own. A reply that names no action changes nothing and is told so. Classic control
    and toy text draw with pygame: `pip install relax-gym[envs]`.
    """

    def __init__(
        self,
        env_id: str,
        env_kwargs: Mapping[str, Any] | None = None,
        actions: Sequence[str] | None = None,
        task: str = "Play this game as well as you can.",
        frame_size: int | None = 256,
        frames: int = 1,
        fps: float | None = None,
    ) -> None:
        check_range("frames", frames, 1, 1000)
        if frame_size is not None:
            check_range("frame_size", frame_size, 8, 10**5)
        if fps is not None:
            check_range("fps", fps, 0.1, 1000.0)
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame opens no window, even where there is a screen
        self.inner = _made(env_id, env_kwargs or {})
        space = self.inner.action_space
        if not isinstance(space, gymnasium.spaces.Discrete):
            raise ConfigError(f"env_id = {env_id!r} has actions {space}; only Discrete actions can be named")
        self.start, count = int(space.start), int(space.n)
        bare = env_id.rpartition(":")[2]
        known = next((names for prefix, names in KNOWN.items() if bare.startswith(prefix)), None)
        given = [str(name).lower() for name in actions or known or range(self.start, self.start + count)]
        if len(given) != count or len(set(given)) != count:
            raise ConfigError(f"actions is {given}; {env_id!r} needs {count} different names")
        self.actions, self.task = tuple(given), task
        self.frame_size, self.frames = frame_size, frames
        self.fps = float(fps or self.inner.metadata.get("render_fps") or 4)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        """Begin, with the env's own seed and options."""
        super().reset(seed=seed)
        self.action_rng = random.Random(self.rng.getrandbits(64))
        try:
            self._begin(self.rng.getrandbits(31) if seed is None else seed, options)
            picture = self._picture()
        except gymnasium.error.DependencyNotInstalled as error:
            raise ConfigError(
                f"{error}; `pip install relax-gym[envs]` brings pygame, which most envs draw with"
            ) from error
        text = f"{self.task} Reply with one of: {', '.join(self.actions)}."
        return user([*self._shown([picture] * self.frames), {"type": "text", "text": text}]), {}

    def step(self, action: str) -> StepResult:
        """Take the action that a reply names last."""
        word = option_named(action, self.actions)
        if word is None:
            return StepResult(user(f"Reply with one of: {', '.join(self.actions)}."), 0.0, False, False, {})
        total, terminated, truncated = 0.0, False, False
        pictures: list[NDArray[np.uint8]] = []
        while len(pictures) < self.frames and not (terminated or truncated):
            self.moves.append(self.start + self.actions.index(word))
            _, reward, terminated, truncated, _ = self.inner.step(self.moves[-1])
            total += float(reward)
            pictures.append(self._picture())
        return StepResult(user(self._shown(pictures)), total, bool(terminated), bool(truncated), {})

    def get_state(self) -> dict[str, Any]:
        """The moves of the episode in place of the env inside, which may hold a screen."""
        return {name: value for name, value in super().get_state().items() if name != "inner"}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Make the moves again. What an env draws from anything but its seed is lost."""
        super().set_state(state)
        if "moves" in state:
            self._begin(*self.begun)
            self.moves = list(state["moves"])
            for move in self.moves:
                self.inner.step(move)

    def _begin(self, seed: int, options: dict[str, Any] | None) -> None:
        self.begun, self.moves = (seed, options), list[int]()
        self.inner.reset(seed=seed, options=options)
        self.inner.action_space.seed(seed)

    def _picture(self) -> NDArray[np.uint8]:
        drawn: Any = self.inner.render()
        picture = PIL.Image.fromarray(np.asarray(drawn, dtype=np.uint8))
        if self.frame_size is not None and max(picture.size) > self.frame_size:
            picture.thumbnail((self.frame_size, self.frame_size))
        return np.array(picture)

    def _shown(self, pictures: list[NDArray[np.uint8]]) -> list[Part]:
        if self.frames == 1:
            return [{"type": "image", "image": pictures[-1]}]
        return [{"type": "video", "video": pictures, "fps": self.fps}]

    def random_action(self) -> str:
        """Any action."""
        return self.action_rng.choice(self.actions)

    def close(self) -> None:
        """Close the env inside."""
        self.inner.close()


def _made(env_id: str, kwargs: Mapping[str, Any]) -> gymnasium.Env[Any, Any]:
    where = f"env_id = {env_id!r}"
    try:
        env: gymnasium.Env[Any, Any] = gymnasium.make(env_id, render_mode="rgb_array", **kwargs)
    except gymnasium.error.UnregisteredEnv as error:
        raise ConfigError(f"{where}: {error} An env of another package is named module:id") from error
    except (gymnasium.error.Error, ImportError, TypeError) as error:
        raise ConfigError(f"{where} cannot be made with render_mode='rgb_array': {error}") from error
    modes = env.metadata.get("render_modes", [])
    if "rgb_array" not in modes:
        raise ConfigError(f"{where} draws no pictures: its render modes are {modes}, without 'rgb_array'")
    return env
