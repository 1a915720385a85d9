"""A large cluttered picture with one small tag that has a letter on it."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import PIL.Image
from numpy.typing import NDArray
from PIL import ImageDraw, ImageFont

Box = tuple[int, int, int, int]
"""Left, top, right and bottom, in pixels."""

TAG = 18
"""Pixels a side of the tag."""

LETTER = 12
SHAPES = 160
CLUTTER = ((196, 160, 120), (120, 160, 190), (160, 190, 130), (190, 140, 160), (150, 150, 165), (205, 190, 140))
PAPER, INK, EDGE, GROUND = (255, 255, 255), (20, 20, 20), (220, 30, 30), (228, 224, 214)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenery:
    """A picture, a letter in it, and by how many degrees the letter is turned, counterclockwise."""

    picture: PIL.Image.Image
    letter: str
    place: tuple[int, int]
    turned: int

    @property
    def tag(self) -> Box:
        """Where the tag is."""
        left, top = self.place
        return left, top, left + TAG, top + TAG

    def view(self, box: Box, side: int, turned: int) -> NDArray[np.uint8]:
        """A part of the picture, its longer side scaled to `side` pixels, turned clockwise: [height, width, 3]."""
        width, height = box[2] - box[0], box[3] - box[1]
        scale = side / max(width, height)
        size = max(1, round(width * scale)), max(1, round(height * scale))
        shown = self.picture.resize(size, PIL.Image.Resampling.LANCZOS, box=box)
        return np.array(shown.rotate(-turned, expand=True))

    def letter_height(self, box: Box, side: int) -> float:
        """Pixels high that the letter is in such a view, 0 where the tag is not whole in it."""
        whole = all(box[n] <= self.tag[n] and self.tag[n + 2] <= box[n + 2] for n in (0, 1))
        return LETTER * side / max(box[2] - box[0], box[3] - box[1]) if whole else 0.0


def draw_scenery(rng: random.Random, letter: str, size: int, *, turn: bool) -> Scenery:
    """Shapes everywhere, and the tag on top of them."""
    picture = PIL.Image.new("RGB", (size, size), GROUND)
    pen = ImageDraw.Draw(picture)
    for _ in range(SHAPES):
        left, top = rng.randrange(size), rng.randrange(size)
        box = (left, top, left + rng.randint(TAG, size // 8), top + rng.randint(TAG, size // 8))
        draw = rng.choice((pen.ellipse, pen.rectangle))
        draw(box, fill=rng.choice(CLUTTER), outline=rng.choice(CLUTTER), width=3)
    turned = rng.choice((0, 90, 180, 270)) if turn else 0
    place = rng.randint(TAG, size - 2 * TAG), rng.randint(TAG, size - 2 * TAG)
    picture.paste(draw_tag(letter).rotate(turned), place)
    return Scenery(picture=picture, letter=letter, place=place, turned=turned)


def draw_tag(letter: str) -> PIL.Image.Image:
    """The tag, upright."""
    tag = PIL.Image.new("RGB", (TAG, TAG), PAPER)
    pen = ImageDraw.Draw(tag)
    pen.text((TAG / 2, TAG / 2), letter, fill=INK, font=ImageFont.load_default(LETTER), anchor="mm")
    pen.rectangle((0, 0, TAG - 1, TAG - 1), outline=EDGE, width=2)  # red enough to be found when it is small
    return tag
