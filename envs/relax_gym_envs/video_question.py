"""Questions about short clips of coloured shapes that come one after another."""

from __future__ import annotations

import random
from collections.abc import Sequence

from relax_gym_envs._clips import COLOURS, DIRECTIONS, Clip, check_size, draw_mover
from relax_gym_envs._quiz import Part, Question, Quiz, check_kinds
from relax_gym_envs._text import check_range

KINDS = ("direction", "count", "order")


class VideoQuestion(Quiz):
    """A clip in which shapes appear one after another and move, and a question: which way, how many, or which first.

    Args:
        questions: kinds to ask: "direction" of a shape, "count" of shapes, "order" (the colour of the first or last).
        turns: questions in an episode.
        same_clip: later questions are other ones about the first clip, which is not shown again, instead of new clips.
        objects: most shapes in a clip, 1 to 4. All clips are equally long; some have gaps.
        frames: frames of each shape, 3 to 64.
        size: pixels a side, 16 to 1024, a multiple of 4. A shape has a quarter of it, and with 4 frames moves by that.
        fps: frames per second, 0.1 to 240.
        wrap: shapes start anywhere and go on through the edge, so that no single frame tells the direction. Without, a
            shape crosses from one edge to the other: easier, as where it starts says much.
        style: "plain" asks in sentences, and the last answer a reply names counts; "terse" asks in a word or two and
            takes an answer only, exactly.
        shuffle_media: show the clip of another seed: what is still learned then is not learned from the video.

    A right answer gives 1 / `turns`. `info["correct"]` says whether all were right.
    """

    def __init__(
        self,
        questions: Sequence[str] = KINDS,
        turns: int = 1,
        same_clip: bool = False,
        objects: int = 3,
        frames: int = 4,
        size: int = 128,
        fps: float = 2.0,
        wrap: bool = True,
        style: str = "plain",
        shuffle_media: bool = False,
    ) -> None:
        super().__init__(turns, style, shuffle_media)
        self.questions = check_kinds("questions", questions, KINDS)
        check_range("objects", objects, 2 if set(questions) - {"direction"} else 1, len(COLOURS))
        check_range("frames", frames, 3, 64)
        check_size(size)
        check_range("fps", fps, 0.1, 240.0)
        self.same_clip, self.objects, self.frames, self.size = same_clip, objects, frames, size
        self.fps, self.wrap = float(fps), wrap

    def _ask(self) -> tuple[list[Part], Question]:
        if self.same_clip and self.asked:
            return [], self._another()
        kind = self.rng.choice(self.questions)
        fewest = 2 if kind == "order" and not self.same_clip else 1
        self.clip = self._draw(self.rng, fewest)
        self.seen = [self.rng.choice(self._about(kind))]
        shown = self._shown(self.clip, lambda rng: self._draw(rng, fewest))
        return [{"type": "video", "video": shown.frames(self.size, self.frames), "fps": self.fps}], self.seen[0]

    def _another(self) -> Question:
        """One not asked yet about this clip; after all of them, from the beginning."""
        fresh = [[question for question in self._about(kind) if question not in self.seen] for kind in self.questions]
        if not any(fresh):
            fresh, self.seen = [self._about(kind) for kind in self.questions], []
        self.seen.append(self.rng.choice(self.rng.choice([left for left in fresh if left])))
        return self.seen[-1]

    def _draw(self, rng: random.Random, fewest: int) -> Clip:
        colours = rng.sample(list(COLOURS), rng.randint(fewest, self.objects))
        colours += [""] * (self.objects - len(colours))
        rng.shuffle(colours)
        movers = [draw_mover(rng, colour, wrap=self.wrap) if colour else None for colour in colours]
        return Clip(slots=tuple(movers), background=rng.randint(0, 60))

    def _about(self, kind: str) -> list[Question]:
        movers, named = self.clip.movers, self.objects > 1
        if kind == "count":
            options = tuple(str(number) for number in range(1, self.objects + 1))
            return [Question(text="How many shapes appear?", terse="count?", answer=str(len(movers)), options=options)]
        if kind == "order":
            asked = {"first": movers[0], "last": movers[-1]}
            return [_colour(f"What colour is the {word} shape?", f"{word}?", m.colour) for word, m in asked.items()]
        return [_direction(f"{mover.colour} " if named else "", mover.direction) for mover in movers]


def _colour(text: str, terse: str, answer: str) -> Question:
    return Question(text=text, terse=terse, answer=answer, options=tuple(COLOURS))


def _direction(which: str, answer: str) -> Question:
    text, terse = f"Which way does the {which}shape move?", f"{which}direction?"
    return Question(text=text, terse=terse, answer=answer, options=tuple(DIRECTIONS))
