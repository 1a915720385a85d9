"""Digits spoken by a small formant synthesiser: harmonics of a voice under three resonances, and shaped noise.

It is intelligible in the way of early speech machines: good enough to tell ten words apart over many voices, and no
stand-in for recorded speech. At rates below 8000 Hz the hiss of s, z and f is mostly lost, as on a bad telephone.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.float64]
BANDWIDTHS = (70.0, 100.0, 160.0)


@dataclass(frozen=True, slots=True)
class Phone:
    """Seconds, three formants in Hz, loudness of the voice, loudness and centre in Hz of the noise."""

    seconds: float
    formants: tuple[float, float, float] = (500.0, 1500.0, 2500.0)
    voice: float = 1.0
    noise: float = 0.0
    centre: float = 4000.0


PHONES = {
    "iy": Phone(0.16, (270, 2290, 3010)),
    "ih": Phone(0.10, (390, 1990, 2550)),
    "eh": Phone(0.12, (530, 1840, 2480)),
    "ah": Phone(0.15, (640, 1190, 2390)),
    "aa": Phone(0.13, (730, 1090, 2440)),
    "ao": Phone(0.14, (570, 840, 2410)),
    "oh": Phone(0.12, (500, 900, 2400)),
    "uw": Phone(0.14, (310, 870, 2240)),
    "w": Phone(0.08, (290, 610, 2150), 0.6),
    "r": Phone(0.09, (330, 1060, 1380), 0.7),
    "n": Phone(0.11, (280, 1700, 2600), 0.35),
    "v": Phone(0.09, (300, 1200, 2300), 0.3, 0.05, 5000),
    "z": Phone(0.11, (280, 1700, 2600), 0.25, 0.2, 5500),
    "s": Phone(0.14, (400, 1700, 2600), 0.0, 0.3, 5500),
    "f": Phone(0.12, (400, 1100, 2200), 0.0, 0.12, 4500),
    "th": Phone(0.11, (400, 1400, 2500), 0.0, 0.1, 5000),
    "closure": Phone(0.05, (400, 1600, 2500), 0.0),
    "t": Phone(0.04, (400, 1700, 2600), 0.0, 0.4, 4000),
    "k": Phone(0.04, (400, 1900, 2500), 0.0, 0.4, 2000),
}
WORDS = {
    "zero": "z ih r oh uw",
    "one": "w ah n",
    "two": "closure t uw",
    "three": "th r iy",
    "four": "f ao r",
    "five": "f aa ih v",
    "six": "s ih closure k s",
    "seven": "s eh v ah n",
    "eight": "eh iy closure t",
    "nine": "n aa ih n",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Voice:
    """Pitch in Hz, how much higher the formants are (short throats have high ones), and how fast it speaks."""

    pitch: float
    formants: float
    speed: float


def draw_voice(rng: random.Random) -> Voice:
    """Any speaker: low or high, with a long or a short throat, slow or quick."""
    return Voice(pitch=rng.uniform(90, 230), formants=rng.uniform(0.9, 1.15), speed=rng.uniform(0.85, 1.25))


def word_seconds(word: str, voice: Voice) -> float:
    """How long a voice takes for a word."""
    return sum(PHONES[name].seconds for name in WORDS[word].split()) / voice.speed


def speak(word: str, voice: Voice, *, rate: int, stretch: float, noise: np.random.Generator) -> Samples:
    """A word [samples] with a peak of 1, `stretch` times as slow, pitch and formants unchanged."""
    phones = [PHONES[name] for name in WORDS[word].split()]
    ends = np.cumsum([phone.seconds for phone in phones]) * stretch / voice.speed
    starts = np.concatenate([[0.0], ends[:-1]])
    knots = np.stack([starts + 0.2 * (ends - starts), ends - 0.2 * (ends - starts)], axis=1).ravel()
    time = np.arange(max(1, int(ends[-1] * rate))) / rate
    silent_ends = np.concatenate([[0.0], knots, [ends[-1]]])

    def level(values: list[float]) -> Samples:
        return np.asarray(np.interp(time, silent_ends, [0.0, *np.repeat(values, 2), 0.0]))

    formants = [
        voice.formants * np.interp(time, knots, np.repeat([phone.formants[i] for phone in phones], 2)) for i in range(3)
    ]
    wave = level([phone.voice for phone in phones]) * _voiced(formants, voice.pitch, rate)
    for centre in sorted({phone.centre for phone in phones if phone.noise}):
        wave += level([phone.noise * (phone.centre == centre) for phone in phones]) * _hiss(centre, rate, time, noise)
    return np.asarray(wave / np.abs(wave).max())


def _voiced(formants: list[Samples], pitch: float, rate: int) -> Samples:
    """Harmonics of a falling pitch, each as loud as the resonances let it."""
    base = pitch * np.linspace(1.1, 0.9, len(formants[0]))
    phase = 2 * np.pi * np.cumsum(base) / rate
    wave = np.zeros_like(base)
    for harmonic in range(1, int(min(4500.0, 0.48 * rate) / (1.1 * pitch)) + 1):
        hertz = harmonic * base
        gain = np.full_like(base, 1 / harmonic)
        for formant, bandwidth in zip(formants, BANDWIDTHS, strict=True):
            gain *= formant**2 / np.sqrt((formant**2 - hertz**2) ** 2 + (bandwidth * hertz) ** 2)
        wave += gain * np.sin(harmonic * phase)
    return np.asarray(wave / np.abs(wave).max())


def _hiss(centre: float, rate: int, time: Samples, noise: np.random.Generator) -> Samples:
    """Noise around a frequency."""
    spectrum = np.fft.rfft(noise.standard_normal(len(time)))
    hertz = np.fft.rfftfreq(len(time), 1 / rate)
    wave = np.fft.irfft(spectrum * np.exp(-(((hertz - centre) / (0.35 * centre)) ** 2)), len(time))
    return np.asarray(wave / (np.abs(wave).max() + 1e-9))
