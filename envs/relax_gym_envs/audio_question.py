"""Questions about synthesised sounds, and a tool to listen again, slower."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

from relax_gym import StepResult
from relax_gym.tools import ToolEnv, ToolError
from relax_gym_envs._quiz import Part, Question, Quiz, check_kinds
from relax_gym_envs._sounds import KINDS
from relax_gym_envs._synth import Sound
from relax_gym_envs._text import check_range

SLOWEST = 4.0


class AudioQuestion(ToolEnv, Quiz):
    """A sound, a question about it, and the `listen_slower` tool, which plays it again stretched in time.

    Args:
        questions: kinds to ask: "pitch" (low, mid or high), "compare" (which of two tones is higher), "count" (of
            beeps, 1 to 4), "rhythm" (which of three beeps is long), "digit" (spoken, 0 to 9, by a simple formant
            synthesiser in many voices: robotic, not recorded speech).
        turns: questions in an episode, each about another sound.
        replays: how often the tool may be used for one question; with 0 there is no tool.
        seconds: of a sound, 0.5 to 30.
        rate: samples per second, 4000 to 48000. Spoken digits lose their hiss below 8000.
        noise: standard deviation of the white noise, 0 to 1; the loudest sample of a sound is at 0.3 to 0.9.
        style: "plain" asks in sentences, and the last answer a reply names counts; "terse" asks in a word and takes an
            answer only, exactly.
        shuffle_media: play the sound of another seed: what is still learned then is not learned from the sound.

    A right answer gives 1 / `turns`. `info["correct"]` says whether all were right.
    """

    def __init__(
        self,
        questions: Sequence[str] = tuple(KINDS),
        turns: int = 1,
        replays: int = 2,
        seconds: float = 1.0,
        rate: int = 16000,
        noise: float = 0.003,
        style: str = "plain",
        shuffle_media: bool = False,
    ) -> None:
        super().__init__(turns, style, shuffle_media)
        self.questions = check_kinds("questions", questions, tuple(KINDS))
        check_range("replays", replays, 0, 100)
        check_range("seconds", seconds, 0.5, 30.0)
        check_range("rate", rate, 4000, 48000)
        check_range("noise", noise, 0.0, 1.0)
        self.replays, self.seconds, self.rate, self.noise = replays, float(seconds), rate, float(noise)
        if not replays:
            self.tools = ()

    def listen_slower(self, factor: float = 2.0) -> list[Part]:
        """Listen to the sound again, slower. Its pitch stays the same.

        Args:
            factor: How many times slower, from 1 to 4.
        """
        if not 1 <= factor <= SLOWEST:
            raise ToolError(f"factor is {factor}; it must be from 1 to {SLOWEST:g}")
        if self.heard >= self.replays:
            raise ToolError(f"you have listened again {self.heard} times, which is all you may; answer now")
        self.heard += 1
        return [self._play(factor), {"type": "text", "text": f"The same sound, {factor:g} times slower."}]

    def on_answer(self, text: str) -> StepResult:
        """Take an answer and ask the next question."""
        return self._take(text)

    def _ask(self) -> tuple[list[Part], Question]:
        kind, self.heard = KINDS[self.rng.choice(self.questions)], 0
        answer = self.rng.choice(kind.options)

        def another(rng: random.Random) -> Sound:
            return kind.sound(rng, rng.choice(kind.options), self.seconds)

        self.sound = self._shown(kind.sound(self.rng, answer, self.seconds), another)
        return [self._play()], kind.question(answer)

    def _play(self, stretch: float = 1.0) -> Part:
        return {"type": "audio", "audio": (self.sound.samples(self.rate, self.noise, stretch), self.rate)}

    def random_action(self) -> str:
        """Any of the answers; now and then, while that is allowed, the tool first."""
        if self.heard < self.replays and self.action_rng.random() < 0.5:
            call = {"name": "listen_slower", "arguments": {"factor": self.action_rng.choice([2, 3, 4])}}
            return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
        return super().random_action()
