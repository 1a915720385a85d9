"""Envs of pictures by their short names, the pictures they show, and an env of gymnasium that is easily told."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

import relax_gym


def make(name: str, **kwargs: Any) -> Any:
    return relax_gym.make(f"relax_gym/{name}-v0", **kwargs)


def pictures(messages: list[Any]) -> list[NDArray[np.uint8]]:
    contents = [message["content"] for message in messages if isinstance(message["content"], list)]
    return [part["image"] for content in contents for part in content if part["type"] == "image"]


def play(env: Any, seed: int, policy: str) -> float:
    """The return of an episode of at most 40 turns."""
    env.reset(seed=seed)
    total = 0.0
    for _ in range(40):
        result = env.step(getattr(env, policy)())
        total += float(result[1])
        if result[2] or result[3]:
            break
    return total


class Counter3(gymnasium.Env[int, int]):
    """Three actions; the picture's shade is the sum of the actions so far."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 5}  # noqa: RUF012

    def __init__(self, render_mode: str | None = None, goal: int = 6, boxed: bool = False) -> None:
        self.render_mode, self.goal = render_mode, goal
        self.action_space = gymnasium.spaces.Box(0, 1) if boxed else gymnasium.spaces.Discrete(3, start=1)
        self.observation_space = gymnasium.spaces.Discrete(100)
        self.total = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        self.total = 0 if seed is None else seed % 2
        return self.total, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.total += int(action)
        return self.total, float(action), self.total >= self.goal, False, {}

    def render(self) -> NDArray[np.uint8]:
        return np.full((20, 40, 3), 10 * self.total, dtype=np.uint8)


gymnasium.register("Counter3-v0", Counter3)
