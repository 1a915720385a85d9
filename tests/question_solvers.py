"""Answers the questions of the video, audio and omni envs from pixels and samples alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from relax_gym_envs._clips import COLOURS
from relax_gym_envs._sounds import PITCHES

ORDINALS = ("first", "second", "third")


def parts(observation: Sequence[Any], kind: str) -> list[Any]:
    """The parts of a kind in an observation."""
    contents = [message["content"] for message in observation]
    whole = [[{"type": "text", "text": content}] if isinstance(content, str) else content for content in contents]
    return [part for content in whole for part in content if part["type"] == kind]


def text_of(observation: Sequence[Any]) -> str:
    """All text of an observation."""
    return "".join(part["text"] for part in parts(observation, "text"))


def colour_name(rgb: Any) -> str:
    """The colour nearest to a pixel."""
    return min(COLOURS, key=lambda name: float(np.abs(np.array(COLOURS[name]) - rgb).sum()))


def find(frame: Any) -> tuple[str, complex, complex] | None:
    """(colour, row, column) of the shape, places as points of a circle because they wrap around; None when empty."""
    rows, columns = np.nonzero(frame.max(axis=-1) > 150)
    if not len(rows):
        return None
    turn = 2j * np.pi / len(frame)
    return colour_name(frame[rows[0], columns[0]]), np.exp(turn * rows).mean(), np.exp(turn * columns).mean()


def shapes(frames: Sequence[Any]) -> list[tuple[str, str]]:
    """(colour, direction) of the shapes in a clip, in order."""
    out = []
    for colour, seen in groupby(filter(None, map(find, frames)), key=lambda found: found[0]):
        places = list(seen)
        down, right = (
            sum(np.angle(after[axis] / before[axis]) for before, after in pairwise(places)) for axis in (1, 2)
        )
        vertical = "down" if down > 0 else "up"
        out.append((colour, vertical if abs(down) > abs(right) else "right" if right > 0 else "left"))
    return out


def answer_video(question: str, frames: Sequence[Any]) -> str:
    """The answer to a question of VideoQuestion."""
    found = shapes(frames)
    if question.startswith("How many"):
        return str(len(found))
    if "colour" in question:
        return found[0 if "first" in question else -1][0]
    return next((way for colour, way in found if f" {colour} " in question or " the shape" in question), "left")


def peak_hertz(samples: Any, rate: int) -> float:
    """The loudest frequency."""
    return float(np.abs(np.fft.rfft(samples)).argmax() * rate / len(samples))


def beeps(samples: Any, rate: int) -> list[float]:
    """Seconds of each stretch that is loud."""
    width = rate // 50
    loud = np.convolve(np.abs(samples), np.ones(width) / width, "same")
    runs = [(key, len(list(run))) for key, run in groupby(loud > 0.3 * loud.max())]
    return [length / rate for key, length in runs if key]


def answer_audio(question: str, samples: Any, rate: int) -> str:
    """The answer to a question of AudioQuestion that is not about a digit."""
    if question.startswith("Is the tone"):
        return pitch(samples, rate)
    if question.startswith("How many beeps"):
        return str(len(beeps(samples, rate)))
    if question.startswith("Which of the two"):
        half = len(samples) // 2
        return ORDINALS[int(peak_hertz(samples[half:], rate) > peak_hertz(samples[:half], rate))]
    lengths = beeps(samples, rate)
    return ORDINALS[min(2, lengths.index(max(lengths)))]


def pitch(samples: Any, rate: int) -> str:
    """The class of a tone."""
    hertz = peak_hertz(samples, rate)
    return next((name for name, (low, high) in PITCHES.items() if low - 2 <= hertz <= high + 2), "")


def speech_features(samples: Any, rate: int, steps: int = 12, bands: int = 24) -> Any:
    """[steps * bands] log energies of a word, from where it begins to where it ends."""
    width = rate // 50
    loud = np.convolve(np.abs(samples), np.ones(width) / width, "same")
    word = samples[slice(*np.nonzero(loud > 0.05 * loud.max())[0][[0, -1]])]
    starts = np.linspace(0, max(0, len(word) - 2 * width), steps).astype(int)
    windows = np.stack([np.resize(word[start : start + 2 * width], 2 * width) for start in starts])
    power = np.abs(np.fft.rfft(windows * np.hanning(2 * width))) ** 2
    edges = np.geomspace(4, power.shape[1] - 1, bands + 1).astype(int)
    logs = np.log(np.add.reduceat(power, edges[:-1], axis=1) + 1e-4)
    return (logs - logs.mean()).ravel()
