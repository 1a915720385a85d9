"""A picture, a video and a sound that mean something only together."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from relax_gym_envs._clips import COLOURS, Clip, Frame, draw_mover
from relax_gym_envs._sounds import PITCHES
from relax_gym_envs._synth import Sound, Tone

ROWS, COLUMNS = ("high", "low"), ("left", "right")
RULE = (
    "The picture is a table of four colours: the left column is for a shape that moves left and the right one for a "
    "shape that moves right, the top row is for a high tone and the bottom one for a low tone."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """The colours of the table row by row, the shape that moves, the pitch and the frequency of the tone in Hz."""

    table: tuple[str, ...]
    clip: Clip
    pitch: str
    hertz: float
    seed: int

    @property
    def direction(self) -> str:
        """Where the shape moves."""
        return self.clip.movers[0].direction

    @property
    def answer(self) -> str:
        """The colour that is meant."""
        return self.table[len(COLUMNS) * ROWS.index(self.pitch) + COLUMNS.index(self.direction)]

    def told(self, modality: str) -> tuple[str, str]:
        """What a modality says: in a sentence, and in as few words as possible."""
        if modality == "image":
            top, bottom = " and ".join(self.table[:2]), " and ".join(self.table[2:])
            return f"From left to right, its top row is {top}, its bottom row {bottom}.", " ".join(self.table)
        if modality == "video":
            return f"The shape moves {self.direction}.", self.direction
        return f"The tone is {self.pitch}.", self.pitch

    def image(self, size: int) -> Frame:
        """The table [size, size, 3]."""
        cells = np.array([COLOURS[colour] for colour in self.table], np.uint8).reshape(len(ROWS), len(COLUMNS), 3)
        return cells.repeat(size // len(ROWS), axis=0).repeat(size // len(COLUMNS), axis=1)

    def sound(self, rate: int, seconds: float) -> NDArray[np.float32]:
        """The tone [samples]."""
        events = (Tone(start=0.0, seconds=seconds, hertz=self.hertz),)
        return Sound(seconds=seconds, events=events, loudness=0.7, seed=self.seed).samples(rate, noise=0.003)


def draw_scene(rng: random.Random, *, wrap: bool) -> Scene:
    """Any table, direction and pitch, independently."""
    clip = Clip(slots=(draw_mover(rng, "white", COLUMNS, wrap=wrap),), background=rng.randint(0, 60))
    pitch = rng.choice(ROWS)
    table = tuple(rng.sample(list(COLOURS), len(ROWS) * len(COLUMNS)))
    return Scene(table=table, clip=clip, pitch=pitch, hertz=rng.uniform(*PITCHES[pitch]), seed=rng.getrandbits(32))
