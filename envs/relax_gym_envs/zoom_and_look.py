"""Find a small detail of a large picture by looking closer."""

from __future__ import annotations

import json
import math
import random
import re
from typing import Any

from relax_gym import Message, StepResult, user
from relax_gym.tools import ToolEnv, ToolError
from relax_gym_envs._quiz import Part
from relax_gym_envs._scenery import LETTER, TAG, draw_scenery
from relax_gym_envs._text import check_choice, check_range

LETTERS = ("A", "E", "F", "K", "P", "R", "T", "Y")
READABLE = 12
"""Pixels high that a letter must be in a view to be read."""

ASK = """Somewhere in this picture is a small white tag with a red edge and a letter on it. Which letter? The \
picture is shown {view} x {view} pixels small; crop shows a part of it larger. Look closer, then reply with one of \
{letters}."""


class ZoomAndLook(ToolEnv):
    """A cluttered picture hides a tag too small to read. Tools show parts of it larger, and turned.

    Args:
        size: pixels a side of the whole picture, 512 to 8192.
        view: pixels a side of what the model is shown, at most an eighth of `size` and 1024: the letter is then too
            small to read. At least 64, and enough for crops by whole pixels of it to make the letter readable.
        looks: how often the tools may be used.
        turn: the letter may stand on its side or on its head. Upright letters can be guessed better than by chance from
            what is shown first.
        look_bonus: reward, besides the 1 for the right letter, for having looked: for a view that really held the tag,
            large enough to read. What the model says about its tools earns nothing.
        style: "plain" asks in sentences, and the last letter a reply names counts; "terse" asks in a word and takes a
            letter only, exactly.

    `info` holds `correct`, and `looked`: whether there was such a view.
    """

    def __init__(
        self,
        size: int = 2048,
        view: int = 256,
        looks: int = 4,
        turn: bool = True,
        look_bonus: float = 0.5,
        style: str = "plain",
    ) -> None:
        check_range("size", size, 512, 8192)
        # A crop is up to two pixels of the view wider than wanted, which must leave half of what may be seen at once.
        check_range("view", view, max(64, math.ceil((4 * READABLE / LETTER * size) ** 0.5)), min(1024, size // 8))
        check_range("looks", looks, 1, 100)
        check_choice("style", style, ("plain", "terse"))
        self.size, self.view, self.looks, self.turn = size, view, looks, turn
        self.look_bonus, self.style = float(look_bonus), style

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        """Show the whole picture, small."""
        super().reset(seed=seed)
        self.scene = draw_scenery(self.rng, self.rng.choice(LETTERS), self.size, turn=self.turn)
        self.action_rng = random.Random(self.rng.getrandbits(64))
        self.used, self.looked, self.turned = 0, False, 0
        self.box = (0, 0, self.view, self.view)
        text = "letter?" if self.style == "terse" else ASK.format(view=self.view, letters=", ".join(LETTERS))
        return user([self._look(), {"type": "text", "text": text}]), {}

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
        where = f"pixels {left} to {right} across, {top} to {bottom} down"
        return [self._look(), {"type": "text", "text": where}]

    def rotate(self, degrees: int) -> list[Part]:
        """Turn what you last looked at.

        Args:
            degrees: How far, clockwise: 90, 180 or 270.
        """
        if degrees not in (90, 180, 270):
            raise ToolError(f"degrees is {degrees}; it must be 90, 180 or 270")
        self._use()
        self.turned = (self.turned + degrees) % 360
        return [self._look(), {"type": "text", "text": f"turned by {self.turned} degrees"}]

    def on_answer(self, text: str) -> StepResult:
        """Take the letter."""
        terse, letter = self.style == "terse", self.scene.letter
        correct = (text if terse else _last_letter(text)) == letter
        reward = correct * (1.0 + self.look_bonus * self.looked)
        verdict = [] if terse else user("Correct." if correct else f"Wrong. It is {letter}.")
        return StepResult(verdict, reward, True, False, {"correct": correct, "looked": self.looked})

    def _use(self) -> None:
        if self.used >= self.looks:
            raise ToolError(f"you have looked {self.used} times, which is all you may; answer now")
        self.used += 1

    def _look(self) -> Part:
        left, top, right, bottom = (round(edge * self.size / self.view) for edge in self.box)
        box = (left, top, right, bottom)
        self.looked |= self.scene.letter_height(box, self.view) >= READABLE
        return {"type": "image", "image": self.scene.view(box, self.view, self.turned)}

    def expert_action(self) -> str:
        """Look where the tag is, turn it upright, then say its letter."""
        if not self.looked:
            scale = self.view / self.size
            reach = LETTER * self.view / (4 * READABLE)  # twice as large as it needs to be
            x, y = (edge + TAG / 2 for edge in self.scene.place)
            left, top = (max(0, math.floor((middle - reach) * scale)) for middle in (x, y))
            right, bottom = (min(self.view, math.ceil((middle + reach) * scale)) for middle in (x, y))
            return _call("crop", left=left, top=top, right=right, bottom=bottom)
        if self.turned != self.scene.turned and self.used < self.looks:
            return _call("rotate", degrees=(self.scene.turned - self.turned) % 360)
        return self.scene.letter

    def random_action(self) -> str:
        """Now and then a look somewhere, else any letter."""
        if self.used < self.looks and self.action_rng.random() < 0.5:
            left, top = (self.action_rng.randrange(self.view // 2) for _ in range(2))
            return _call("crop", left=left, top=top, right=left + self.view // 2, bottom=top + self.view // 2)
        return self.action_rng.choice(LETTERS)


def _call(name: str, **arguments: int) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _last_letter(text: str) -> str:
    """The last capital that stands alone, or a text of one small letter; else ""."""
    named = re.findall(r"(?<![A-Za-z0-9])[A-Z](?![A-Za-z0-9])", text)
    named = [letter for letter in named if letter in LETTERS] or re.findall(r"\A\W*([a-z])\W*\Z", text)
    return str(named[-1]).upper() if named else ""
