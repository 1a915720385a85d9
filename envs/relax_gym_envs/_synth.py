"""Sounds described by what happens in them, so that they can be made again at any rate and speed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from relax_gym_envs._speech import Voice, speak

FADE = 0.005  # seconds in which a tone comes and goes, so that it does not click


@dataclass(frozen=True, slots=True, kw_only=True)
class Tone:
    """A sine tone: when it begins, how long it lasts, and its frequency in Hz."""

    start: float
    seconds: float
    hertz: float

    def samples(self, rate: int, stretch: float, noise: np.random.Generator) -> NDArray[np.float64]:
        """[samples], longer by `stretch`, with a peak of 1."""
        time = np.arange(max(1, int(self.seconds * stretch * rate))) / rate
        edge = np.clip(np.minimum(time, time[-1] - time) / FADE, 0, 1)
        return np.asarray(edge * np.sin(2 * np.pi * self.hertz * time + noise.uniform(0, 2 * np.pi)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """A word: when it begins, and whose voice says it."""

    start: float
    word: str
    voice: Voice

    def samples(self, rate: int, stretch: float, noise: np.random.Generator) -> NDArray[np.float64]:
        """[samples], longer by `stretch`, with a peak of 1."""
        return speak(self.word, self.voice, rate=rate, stretch=stretch, noise=noise)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sound:
    """What is heard in `seconds`, how loud its peak is (0 to 1), and the seed of its noise."""

    seconds: float
    events: tuple[Tone | Spoken, ...]
    loudness: float
    seed: int

    def samples(self, rate: int, noise: float, stretch: float = 1.0) -> NDArray[np.float32]:
        """A new array, `stretch` times as long at the same pitch; `noise` is the standard deviation of white noise."""
        random = np.random.default_rng(self.seed)
        wave = np.zeros(int(self.seconds * stretch * rate))
        for event in self.events:
            start = int(event.start * stretch * rate)
            heard = event.samples(rate, stretch, random)[: len(wave) - start]
            wave[start : start + len(heard)] += self.loudness * heard
        return (wave + random.normal(0.0, noise, len(wave))).astype(np.float32)
