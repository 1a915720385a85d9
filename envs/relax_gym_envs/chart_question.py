"""Questions about charts that are drawn anew."""

from __future__ import annotations

import random
from collections.abc import Sequence

from relax_gym_envs._charts import COLOURS, KINDS, LABELS, STEP, TOP, Chart, draw_chart
from relax_gym_envs._quiz import Part, Question, Quiz, check_kinds
from relax_gym_envs._text import check_range

QUESTIONS = ("highest", "lowest", "value", "colour", "above")


class ChartQuestion(Quiz):
    """A bar, line or pie chart, and a question whose answer stands in it.

    Args:
        charts: kinds of charts: "bar", "line", "pie".
        questions: kinds to ask: the "highest" or "lowest" label, the "value" of a label, the "colour" of a label, how
            many are "above" a value. Of a pie, which has no scale, only the first two and the colour.
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
        bars: int = 4,
        turns: int = 1,
        same_chart: bool = False,
        size: int = 384,
        style: str = "plain",
        shuffle_media: bool = False,
    ) -> None:
        super().__init__(turns, style, shuffle_media)
        self.charts, self.questions = (
            check_kinds("charts", charts, KINDS),
            check_kinds("questions", questions, QUESTIONS),
        )
        check_range("bars", bars, 2, len(COLOURS))
        check_range("size", size, 64, 2048)
        self.bars, self.same_chart, self.size = bars, same_chart, size

    def _ask(self) -> tuple[list[Part], Question]:
        if self.same_chart and self.asked:
            return [], self._about(self.chart)
        self.chart = draw_chart(self.rng, self.rng.choice(self.charts), self.bars)
        question = self._about(self.chart)

        def another(rng: random.Random) -> Chart:
            return draw_chart(rng, self.chart.kind, self.bars)

        shown = self._shown(self.chart, another)
        return [{"type": "image", "image": shown.draw(self.size)}], question

    def _about(self, chart: Chart) -> Question:
        known = self.questions if chart.kind != "pie" else tuple(set(self.questions) - {"value", "above"})
        kind = self.rng.choice(sorted(known) or ["highest"])
        number = self.rng.randrange(self.bars)
        label, value, colour = chart.labels[number], chart.values[number], chart.colours[number]
        levels = tuple(str(level) for level in range(STEP, TOP + 1, STEP))
        if kind == "value":
            return Question(text=f"What is the value of {label}?", terse=f"{label}?", answer=str(value), options=levels)
        if kind == "colour":
            text, options = f"Which colour is {label}?", tuple(COLOURS)
            return Question(text=text, terse=f"{label} colour?", answer=colour, options=options)
        if kind == "above":
            limit = self.rng.choice(range(STEP, TOP, STEP)) + STEP // 2
            answer, options = str(sum(v > limit for v in chart.values)), tuple(str(n) for n in range(self.bars + 1))
            return Question(
                text=f"How many are above {limit}?", terse=f"above {limit}?", answer=answer, options=options
            )
        extreme = max(chart.values) if kind == "highest" else min(chart.values)
        answer = chart.labels[chart.values.index(extreme)]
        return Question(text=f"Which label has the {kind} value?", terse=f"{kind}?", answer=answer, options=LABELS)
