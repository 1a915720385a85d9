"""Bar, line and pie charts of a few labelled numbers."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import PIL.Image
from numpy.typing import NDArray
from PIL import ImageDraw, ImageFont

COLOURS = {
    "red": (214, 69, 65),
    "green": (67, 160, 71),
    "blue": (66, 113, 214),
    "orange": (240, 150, 50),
    "purple": (142, 68, 173),
    "black": (40, 40, 40),
}
LABELS = ("ash", "beech", "cedar", "elm", "fir", "larch", "oak", "pine")
KINDS = ("bar", "line", "pie")
STEP, TOP = 10, 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Labels with a number (a multiple of 10, up to 100, all different) and a colour each."""

    kind: str
    labels: tuple[str, ...]
    values: tuple[int, ...]
    colours: tuple[str, ...]

    def draw(self, size: int) -> NDArray[np.uint8]:
        """The picture [size, size, 3]."""
        picture = PIL.Image.new("RGB", (size, size), (255, 255, 255))
        pen = ImageDraw.Draw(picture)
        if self.kind == "pie":
            self._pie(pen, size)
        else:
            self._bars(pen, size)
        return np.array(picture)

    def _bars(self, pen: ImageDraw.ImageDraw, size: int) -> None:
        font = ImageFont.load_default(size / 26)
        left, right, top, bottom = 0.12 * size, 0.97 * size, 0.05 * size, 0.88 * size
        for level in range(0, TOP + 1, 2 * STEP):
            y = bottom - (bottom - top) * level / TOP
            pen.line((left, y, right, y), fill=(205, 205, 205))
            pen.text((left - 0.015 * size, y), str(level), fill=(60, 60, 60), font=font, anchor="rm")
        width, dots = (right - left) / len(self.labels), []
        for number, (label, value, colour) in enumerate(zip(self.labels, self.values, self.colours, strict=True)):
            x, y = left + (number + 0.5) * width, bottom - (bottom - top) * value / TOP
            if self.kind == "bar":
                pen.rectangle((x - 0.32 * width, y, x + 0.32 * width, bottom), fill=COLOURS[colour])
            dots.append((x, y, COLOURS[colour]))
            pen.text((x, bottom + 0.02 * size), label, fill=(20, 20, 20), font=font, anchor="mt")
        if self.kind == "line":
            pen.line([(x, y) for x, y, _ in dots], fill=(120, 120, 120), width=max(1, size // 128))
            for x, y, paint in dots:
                pen.circle((x, y), 0.022 * size, fill=paint)

    def _pie(self, pen: ImageDraw.ImageDraw, size: int) -> None:
        font, start = ImageFont.load_default(size / 24), -90.0
        box = (0.05 * size, 0.2 * size, 0.65 * size, 0.8 * size)
        for number, (label, value, colour) in enumerate(zip(self.labels, self.values, self.colours, strict=True)):
            end = start + 360 * value / sum(self.values)
            pen.pieslice(box, start, end, fill=COLOURS[colour], outline=(255, 255, 255), width=max(1, size // 128))
            y, start = (0.25 + 0.09 * number) * size, end
            pen.rectangle((0.71 * size, y, 0.75 * size, y + 0.04 * size), fill=COLOURS[colour])
            pen.text((0.77 * size, y + 0.02 * size), label, fill=(20, 20, 20), font=font, anchor="lm")


def draw_chart(rng: random.Random, kind: str, bars: int, limit: int | None = None) -> Chart:
    """A chart of `bars` numbers. With a `limit` each number of them that may be above it is equally likely."""
    levels = range(STEP, TOP + 1, STEP)
    if limit is None:
        values = rng.sample(levels, bars)
    else:
        low, high = [v for v in levels if v <= limit], [v for v in levels if v > limit]
        above = rng.randint(max(0, bars - len(low)), min(bars, len(high)))
        values = rng.sample([*rng.sample(low, bars - above), *rng.sample(high, above)], bars)
    return Chart(
        kind=kind,
        labels=tuple(rng.sample(LABELS, bars)),
        values=tuple(values),
        colours=tuple(rng.sample(list(COLOURS), bars)),
    )
