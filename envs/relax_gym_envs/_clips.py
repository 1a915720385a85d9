"""Coloured shapes that move through a picture."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from relax_gym.errors import ConfigError
from relax_gym.media import Audio, Video
from relax_gym_envs._text import check_range

Frame = NDArray[np.uint8]
COLOURS = {"red": (230, 30, 30), "green": (30, 200, 30), "blue": (30, 60, 230), "yellow": (230, 220, 30)}
PAINTS = COLOURS | {"white": (240, 240, 240)}
DIRECTIONS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
SHAPES = ("square", "circle", "triangle")
GRID = 4  # A picture is so many shapes wide and high.


def check_size(size: int) -> None:
    """Raise ConfigError unless a picture `size` pixels a side can hold `GRID` shapes a side."""
    check_range("size", size, 16, 1024)
    if size % GRID:
        raise ConfigError(f"size is {size!r}; it must be a multiple of {GRID}, such as {size - size % GRID}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mover:
    """A shape, where it starts (row and column, in shapes), and where it goes."""

    colour: str
    shape: str
    direction: str
    start: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """What is seen one after another: in each slot a shape that moves, or nothing."""

    slots: tuple[Mover | None, ...]
    background: int

    @property
    def movers(self) -> list[Mover]:
        """The shapes in the order in which they appear."""
        return [mover for mover in self.slots if mover]

    def frames(self, size: int, frames_per_slot: int) -> list[Frame]:
        """New frames [size, size, 3]. In a slot a shape goes three quarters of the way, on through the edge."""
        out = []
        for mover in self.slots:
            for time in range(frames_per_slot):
                frame = np.full((size, size, 3), self.background, np.uint8)
                if mover:
                    _paint(frame, mover, time / (frames_per_slot - 1) * (1 - 1 / GRID))
                out.append(frame)
        return out


def draw_mover(rng: random.Random, colour: str, directions: Sequence[str] = tuple(DIRECTIONS), *, wrap: bool) -> Mover:
    """A shape that starts anywhere; without `wrap` at the edge from which it crosses the picture."""
    direction = rng.choice(directions)
    start = [rng.randrange(GRID), rng.randrange(GRID)]
    if not wrap:
        for axis, step in enumerate(DIRECTIONS[direction]):
            start[axis] = 0 if step > 0 else GRID - 1 if step < 0 else start[axis]
    return Mover(colour=colour, shape=rng.choice(SHAPES), direction=direction, start=(start[0], start[1]))


def with_sound(frames: Sequence[Frame], fps: float, sound: NDArray[np.float32], rate: int) -> Video:
    """A video with a sound track of `rate` samples per second."""
    return Video(
        frames=np.stack(frames),
        times=np.arange(len(frames)) / fps,
        indices=np.arange(len(frames)),
        total_frames=len(frames),
        duration=len(frames) / fps,
        audio=Audio(samples=sound, rate=rate),
    )


def _paint(frame: Frame, mover: Mover, way: float) -> None:
    size = len(frame)
    down, right = (
        round(size * (start / GRID + way * step))
        for start, step in zip(mover.start, DIRECTIONS[mover.direction], strict=True)
    )
    stamp = np.zeros((size, size), bool)
    stamp[: size // GRID, : size // GRID] = _mask(mover.shape, size // GRID)
    frame[np.roll(stamp, (down, right), axis=(0, 1))] = PAINTS[mover.colour]


def _mask(shape: str, size: int) -> NDArray[np.bool_]:
    rows, columns = np.mgrid[:size, :size] + 0.5 - size / 2
    if shape == "circle":
        return np.asarray(rows**2 + columns**2 <= (size / 2) ** 2)
    if shape == "triangle":
        return np.asarray(2 * np.abs(columns) <= rows + size / 2)
    return np.ones((size, size), bool)
