"""Questions about charts that are drawn anew."""

from __future__ import annotations

import random
from collections.abc import Sequence

from relax_gym.errors import ConfigError
from relax_gym_envs._charts import COLOURS, KINDS, LABELS, STEP, TOP, Chart, draw_chart
from relax_gym_envs._quiz import Part, Question, Quiz, check_kinds
from relax_gym_envs._text import check_range, last_number

QUESTIONS = ("highest", "lowest", "value", "colour", "above", "difference")
SCALED = ("value", "above", "difference")
"""Questions that need a scale, which a pie does not have."""

LIMITS = range(35, 76, STEP)
"""What is asked to be above: with few levels on one side the limit would tell the answer."""

LEVELS = tuple(str(level) for level in range(STEP, TOP + 1, STEP))


class ChartQuestion(Quiz):
    """A bar, line or pie chart, and a question whose answer stands in it.

    Args:
        charts: kinds of charts: "bar", "line", "pie".
        questions: kinds to ask: the "highest" or "lowest" label, the "value" of a label, the "colour" of a label, how
            many are "above" a value, the "difference" of two. Of a pie, which has no scale, only the extremes and the
            colour.
        tolerance: how far a number may be from the value or difference, which is a multiple of 10.
        bars: numbers in a chart, 2 to 6.
        turns: questions in an episode.
        same_chart: later questions are about the first chart, which is not shown again, instead of new charts.
        size: pixels a side, 64 to 2048. Labels need about 200 to be read.
        style: "plain" asks in sentences, and the last answer a reply names counts; "terse" asks in a word or two and
            takes an answer only, exactly.
        shuffle_media: show another chart: what is still learned then is not learned from it.

    A right answer gives 1 / `turns`. `info["correct"]` says whether all were right.
    """

    chart: Chart

    def __init__(
        self,
        charts: Sequence[str] = KINDS,
        questions: Sequence[str] = QUESTIONS,
        tolerance: int = 0,
        bars: int = 4,
        turns: int = 1,
        same_chart: bool = False,
        size: int = 384,
        style: str = "plain",
        shuffle_media: bool = False,
    ) -> None:
        super().__init__(turns, style, shuffle_media)
        self.questions = check_kinds("questions", questions, QUESTIONS)
        self.charts = tuple(kind for kind in check_kinds("charts", charts, KINDS) if self._askable(kind))
        if not self.charts:
            raise ConfigError(f"questions is {list(questions)}; a pie has no scale to answer them; add other charts")
        check_range("tolerance", tolerance, 0, TOP)
        check_range("bars", bars, 2, len(COLOURS))
        check_range("size", size, 64, 2048)
        self.bars, self.tolerance, self.same_chart, self.size = bars, tolerance, same_chart, size

    def _askable(self, chart: str) -> tuple[str, ...]:
        return tuple(kind for kind in self.questions if chart != "pie" or kind not in SCALED)

    def _ask(self) -> tuple[list[Part], Question]:
        if self.same_chart and self.asked:
            kind = self.rng.choice(self._askable(self.chart.kind))
            return [], self._about(self.chart, kind, self.rng.choice(LIMITS))
        drawn, limit = self.rng.choice(self.charts), self.rng.choice(LIMITS)
        kind = self.rng.choice(self._askable(drawn))
        self.chart = draw_chart(self.rng, drawn, self.bars, limit if kind == "above" else None)
        question = self._about(self.chart, kind, limit)

        def another(rng: random.Random) -> Chart:
            return draw_chart(rng, self.chart.kind, self.bars)

        shown = self._shown(self.chart, another)
        return [{"type": "image", "image": shown.draw(self.size)}], question

    def _about(self, chart: Chart, kind: str, limit: int) -> Question:
        number, second = self.rng.sample(range(self.bars), 2)
        label, value, colour = chart.labels[number], chart.values[number], chart.colours[number]
        if kind == "value":
            return Question(text=f"What is the value of {label}?", terse=f"{label}?", answer=str(value), options=LEVELS)
        if kind == "difference":
            other, answer = chart.labels[second], str(abs(value - chart.values[second]))
            text = f"What is the difference between {label} and {other}?"
            return Question(text=text, terse=f"{label} - {other}?", answer=answer, options=LEVELS)
        if kind == "colour":
            text, options = f"Which colour is {label}?", tuple(COLOURS)
            return Question(text=text, terse=f"{label} colour?", answer=colour, options=options)
        if kind == "above":
            answer, options = str(sum(v > limit for v in chart.values)), tuple(str(n) for n in range(self.bars + 1))
            return Question(
                text=f"How many are above {limit}?", terse=f"above {limit}?", answer=answer, options=options
            )
        extreme = max(chart.values) if kind == "highest" else min(chart.values)
        answer = chart.labels[chart.values.index(extreme)]
        return Question(text=f"Which label has the {kind} value?", terse=f"{kind}?", answer=answer, options=LABELS)

    def _right(self, text: str) -> bool:
        if self.question.options != LEVELS or not self.tolerance:
            return super()._right(text)
        number = last_number(text) if self.style == "plain" or text.isdecimal() else None
        return number is not None and abs(number - int(self.question.answer)) <= self.tolerance
