"""DAPO's verifier of mathematics: 1 when "Answer: …" at the end is the reference as written, else -1."""

from __future__ import annotations

import re
from dataclasses import dataclass

from relax_gym.types import Trajectory
from relax_gym_rewards._answers import answer_text, boxed, choice_option, number_option, references
from relax_gym_rewards._latex import plain_latex

ANSWER = re.compile(r"\banswer\b\**\s{0,3}[:：]([^\n]*)", re.IGNORECASE)
TAIL = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class DAPOMath:
    r"""1 when the last "Answer: …" of the last 300 characters is `info[field]` in one way of writing, else `wrong`.

    As DAPO's data ask (arXiv 2503.14476); `answer = "boxed"` takes the last `\boxed{…}` there instead. Texts are
    compared after rewriting (dollars, units, `\dfrac12` …), nothing is computed: 0.5 is not 1/2.
    """

    field: str = "answer"
    answer: str = "line"
    wrong: float = -1.0

    def __post_init__(self) -> None:
        choice_option("dapo_math", "answer", self.answer, ("line", "boxed"))
        number_option("dapo_math", "wrong", self.wrong, -1e6, 1)

    def __call__(self, trajectory: Trajectory, /) -> float:
        allowed = [plain_latex(item) for item in references(trajectory, self.field, "dapo_math")]
        tail = answer_text(trajectory)[-TAIL:]
        lines = [tail_line[1] for tail_line in ANSWER.finditer(tail)]
        given = boxed(tail) if self.answer == "boxed" else lines[-1] if lines else None
        return 1.0 if given is not None and plain_latex(given) in allowed else float(self.wrong)
