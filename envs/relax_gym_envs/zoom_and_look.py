"""Find a small detail of a large picture by looking closer."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import PIL.Image

from relax_gym import Message, StepResult, user
from relax_gym.tools import ToolEnv, ToolError
from relax_gym_envs._quiz import Part
from relax_gym_envs._scenery import LETTER, draw_scenery
from relax_gym_envs._text import check_range

LETTERS = ("A", "E", "F", "K", "P", "R", "T", "Y")
READABLE = 12
"""Pixels high that a letter must be in a view to be read."""

ASK = """Somewhere in this picture is a small white tag with a letter on it. Which letter? The picture is shown \
{view} x {view} pixels small; crop shows a part of it larger. Look closer, then reply with one of {letters}."""


class ZoomAndLook(ToolEnv):
    """A cluttered picture hides a tag too small to read. Tools show parts of it larger, and turned.

    Args:
        size: pixels a side of the whole picture, 512 to 8192.
        view: pixels a side of what the model is shown, 64 to 1024, at most half of `size`.
        looks: how often the tools may be used.
        turn: the letter may stand on its side or on its head.
        look_bonus: reward, besides the 1 for the right letter, for having looked: for a view that really held the tag,
            large enough to read. What the model says about its tools earns nothing.

    `info` holds `correct`, and `looked`: whether there was such a view.
    """

    def __init__(
        self, size: int = 1024, view: int = 256, looks: int = 4, turn: bool = True, look_bonus: float = 0.5
    ) -> None:
        check_range("size", size, 512, 8192)
        check_range("view", view, 64, min(1024, size // 2))
        check_range("looks", looks, 1, 100)
        self.size, self.view, self.looks, self.turn, self.look_bonus = size, view, looks, turn, float(look_bonus)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        """Show the whole picture, small."""
        super().reset(seed=seed)
        self.scene = draw_scenery(self.rng, self.rng.choice(LETTERS), self.size, turn=self.turn)
        self.action_rng = random.Random(self.rng.getrandbits(64))
        self.used, self.looked, self.turned = 0, False, 0
        self.box = (0, 0, self.view, self.view)
        text = ASK.format(view=self.view, letters=", ".join(LETTERS))
        return user([self._show(), {"type": "text", "text": text}]), {}

    def crop(self, left: int, top: int, right: int, bottom: int) -> list[Part]:
        """Look at a part of the picture, enlarged.

        Args:
            left: Left edge, in pixels of the picture as it was shown first.
            top: Upper edge.
            right: Right edge.
            bottom: Lower edge.
        """
        if not (0 <= left < right <= self.view and 0 <= top < bottom <= self.view):
            raise ToolError(f"({left}, {top}, {right}, {bottom}) is no part of the {self.view} x {self.view} pixels")
        self._use()
        self.box, self.turned = (left, top, right, bottom), 0
        return self._view(f"pixels {left} to {right} across, {top} to {bottom} down")

    def rotate(self, degrees: int) -> list[Part]:
        """Turn what you last looked at.

        Args:
            degrees: How far, clockwise: 90, 180 or 270.
        """
        if degrees not in (90, 180, 270):
            raise ToolError(f"degrees is {degrees}; it must be 90, 180 or 270")
        self._use()
        self.turned = (self.turned + degrees) % 360
        return self._view(f"turned by {self.turned} degrees")

    def on_answer(self, text: str) -> StepResult:
        """Take the letter: the last one named, as a word of its own."""
        named = [word for word in text.upper().replace(".", " ").split() if word in LETTERS]
        correct = bool(named) and named[-1] == self.scene.letter
        reward = correct * (1.0 + self.look_bonus * self.looked)
        verdict = "Correct." if correct else f"Wrong. It is {self.scene.letter}."
        return StepResult(user(verdict), reward, True, False, {"correct": correct, "looked": self.looked})

    def _use(self) -> None:
        if self.used >= self.looks:
            raise ToolError(f"you have looked {self.used} times, which is all you may; answer now")
        self.used += 1

    def _view(self, what: str) -> list[Part]:
        left, top, right, bottom = self._area()
        tag = self.scene.tag
        whole = left <= tag[0] and top <= tag[1] and tag[2] <= right and tag[3] <= bottom
        self.looked |= whole and LETTER * self.view / max(right - left, bottom - top) >= READABLE
        return [self._show(), {"type": "text", "text": what}]

    def _area(self) -> tuple[int, int, int, int]:
        """The box in pixels of the whole picture."""
        scale = self.size / self.view
        left, top, right, bottom = (round(edge * scale) for edge in self.box)
        return left, top, right, bottom

    def _show(self) -> Part:
        left, top, right, bottom = self._area()
        scale = self.view / max(right - left, bottom - top)
        size = max(1, round((right - left) * scale)), max(1, round((bottom - top) * scale))
        shown = self.scene.picture.resize(size, PIL.Image.Resampling.LANCZOS, box=(left, top, right, bottom))
        return {"type": "image", "image": np.asarray(shown.rotate(-self.turned, expand=True))}

    def expert_action(self) -> str:
        """Look where the tag is, then say its letter."""
        if self.looked:
            return self.scene.letter
        x, y = (round((edge + LETTER // 2) * self.view / self.size) for edge in self.scene.place)
        reach = self.view // 8
        edges = (x - reach, y - reach, x + reach, y + reach)
        left, top, right, bottom = (min(max(edge, 0), self.view) for edge in edges)
        return _call("crop", left=left, top=top, right=right, bottom=bottom)

    def random_action(self) -> str:
        """Now and then a look somewhere, else any letter."""
        if self.used < self.looks and self.action_rng.random() < 0.5:
            left, top = (self.action_rng.randrange(self.view // 2) for _ in range(2))
            return _call("crop", left=left, top=top, right=left + self.view // 2, bottom=top + self.view // 2)
        return self.action_rng.choice(LETTERS)


def _call(name: str, **arguments: int) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
