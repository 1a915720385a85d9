"""A language model judges one episode."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from relax_gym.errors import RewardError
from relax_gym.types import Trajectory
from relax_gym_rewards._episode import final_action, reference
from relax_gym_rewards.genrm.base import Judge, Question, facts_of, first_question
from relax_gym_rewards.genrm.prompt import (
    ANSWER,
    ENDING,
    QUESTION,
    REFERENCE,
    RUBRIC,
    fill,
    inline_or_file,
    slots_of,
)
from relax_gym_rewards.genrm.verdict import Form, VerdictRule


@dataclass(kw_only=True, eq=False)
class GenRM(Judge):
    """What a language model says of the last action (or the transcript), by a rubric; unscored when it says nothing.

    From 0 to 1 on a scale, or what `words` are worth. Attributes beside those of every judge:

    Attributes:
        field: where in info the right answer is; "" judges without one.
        rubric, rubric_file: what to judge by, as text or in a file.
        template, template_file: the whole message, with {question}, {answer}, {reference}, {transcript}, {rubric} and
            {verdict}, which says in what form the verdict must be.
        parse: "scale", "words" or "json". low, high: ends of the scale. normalise: make it 0 to 1.
        words: what each word is worth, e.g. {correct = 1.0, wrong = 0.0}. json_field: where the verdict of a JSON is.
    """

    field: str = "answer"
    rubric: str = ""
    rubric_file: str = ""
    template: str = ""
    template_file: str = ""
    parse: Form = "scale"
    low: float = 0.0
    high: float = 10.0
    normalise: bool = True
    words: Mapping[str, float] = dataclasses.field(default_factory=dict)
    json_field: str = "score"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._rule = VerdictRule(
            form=self.parse,
            low=self.low,
            high=self.high,
            normalise=self.normalise,
            words=self.words,
            json_field=self.json_field,
        )
        self._rubric = inline_or_file("rubric", self.rubric, self.rubric_file) or RUBRIC
        own = QUESTION + (REFERENCE if self.field else "") + ANSWER + ENDING
        self._template = inline_or_file("template", self.template, self.template_file) or own
        slots = slots_of(self._template)
        if "verdict" not in slots or not slots & {"answer", "transcript"}:
            raise RewardError(
                f"genrm: template has {', '.join(sorted(slots)) or 'no slots'}; it needs {{verdict}}, and {{answer}} "
                "or {transcript}"
            )
        if "reference" in slots and not self.field:
            raise RewardError("genrm: template has {reference}, but field is empty; say where in info it is")

    async def __call__(self, trajectory: Trajectory, /) -> float:
        values = await self.ask(self.question(trajectory))
        self.note_spread(values)
        return statistics.fmean(values)

    def question(self, trajectory: Trajectory) -> Question:
        """What the judge is asked about an episode. Raises RewardError when something the template needs is missing."""
        slots = slots_of(self._template)
        texts = {"question": first_question(trajectory), "answer": final_action(trajectory)}
        if "reference" in slots:
            texts["reference"] = str(reference(trajectory, self.field))
        messages = trajectory.messages if "transcript" in slots else []

        def render(mark: str) -> str:
            framed = {name: lambda n=name, t=text: self.framer.framed(n, t, mark) for name, text in texts.items()}
            return fill(
                self._template,
                {
                    **framed,
                    "transcript": lambda: self.framer.transcript(messages, mark),
                    "rubric": lambda: self._rubric,
                    "verdict": lambda: self._rule.instruction(mark),
                },
            )

        return Question(
            texts=[*texts.values(), *map(str, messages)],
            render=render,
            read=self._rule.read,
            facts=facts_of(self._rule, self.framer),
        )
