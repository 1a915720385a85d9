"""The kinds of question about a sound: for each what is heard, the answer, and how it is asked."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from relax_gym_envs._quiz import NUMBERS, Question
from relax_gym_envs._speech import Voice, draw_voice, word_seconds
from relax_gym_envs._synth import Sound, Spoken, Tone

PITCHES = {"low": (150.0, 250.0), "mid": (500.0, 700.0), "high": (1200.0, 1700.0)}
ORDINALS = ("first", "second", "third")
Events = tuple[Tone | Spoken, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SoundKind:
    """How a sound for an answer is drawn (rng, answer, seconds), and the question."""

    draw: Callable[[random.Random, str, float], Events]
    text: str
    terse: str
    options: tuple[str, ...]

    def question(self, answer: str) -> Question:
        """The question with its answer."""
        return Question(text=self.text, terse=self.terse, answer=answer, options=self.options)

    def sound(self, rng: random.Random, answer: str, seconds: float) -> Sound:
        """A sound for an answer."""
        events = self.draw(rng, answer, seconds)
        return Sound(seconds=seconds, events=events, loudness=rng.uniform(0.3, 0.9), seed=rng.getrandbits(32))


def _tone(rng: random.Random, pitch: str, seconds: float) -> Events:
    """One tone of a pitch class, all the time."""
    return (Tone(start=0.0, seconds=seconds, hertz=rng.uniform(*PITCHES[pitch])),)


def _two_tones(rng: random.Random, higher: str, seconds: float) -> Events:
    lower = 200.0 * 4.0 ** rng.random()
    hertz = [lower, lower * rng.uniform(1.3, 2.0)]
    hertz = hertz if higher == "second" else hertz[::-1]
    pairs = zip((0.1, 0.55), hertz, strict=True)
    return tuple(Tone(start=at * seconds, seconds=0.35 * seconds, hertz=tone) for at, tone in pairs)


def _beeps(rng: random.Random, count: str, seconds: float) -> Events:
    hertz, first, length = rng.uniform(300, 1200), rng.uniform(0, 0.1), rng.uniform(0.08, 0.12)
    starts = [(first + 0.22 * number) * seconds for number in range(int(count))]
    return tuple(Tone(start=start, seconds=length * seconds, hertz=hertz) for start in starts)


def _one_long(rng: random.Random, which: str, seconds: float) -> Events:
    hertz, at, tones = rng.uniform(300, 1200), rng.uniform(0, 0.2) * seconds, []
    for ordinal in ORDINALS:
        length = (0.3 if ordinal == which else 0.1) * seconds
        tones.append(Tone(start=at, seconds=length, hertz=hertz))
        at += length + 0.12 * seconds
    return tuple(tones)


def _spoken_digit(rng: random.Random, digit: str, seconds: float) -> Events:
    voice, word = draw_voice(rng), NUMBERS[int(digit)]
    fitting = max(voice.speed, voice.speed * word_seconds(word, voice) / (0.95 * seconds))
    voice = Voice(pitch=voice.pitch, formants=voice.formants, speed=fitting)
    return (Spoken(start=rng.uniform(0, seconds - word_seconds(word, voice)), word=word, voice=voice),)


KINDS = {
    "pitch": SoundKind(draw=_tone, text="Is the tone low, mid or high?", terse="pitch?", options=tuple(PITCHES)),
    "compare": SoundKind(
        draw=_two_tones, text="Which of the two tones is higher?", terse="higher?", options=ORDINALS[:2]
    ),
    "count": SoundKind(draw=_beeps, text="How many beeps do you hear?", terse="beeps?", options=("1", "2", "3", "4")),
    "rhythm": SoundKind(draw=_one_long, text="Which of the three beeps is long?", terse="long?", options=ORDINALS),
    "digit": SoundKind(
        draw=_spoken_digit, text="Which digit is spoken?", terse="digit?", options=tuple(map(str, range(10)))
    ),
}
