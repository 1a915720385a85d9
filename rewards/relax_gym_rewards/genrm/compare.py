"""A language model compares the episodes of a group: two at a time in both orders, or all at once in several orders."""

from __future__ import annotations

import asyncio
import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from string import ascii_uppercase
from typing import Any, Literal, get_args

from relax_gym.errors import RewardError
from relax_gym.types import Trajectory
from relax_gym_rewards._episode import final_action, reference
from relax_gym_rewards.genrm.base import Judge, Question, facts_of, first_question
from relax_gym_rewards.genrm.prompt import ENDING, QUESTION, REFERENCE, fill, inline_or_file
from relax_gym_rewards.genrm.verdict import OBJECT, NoVerdict, VerdictRule

Mode = Literal["pairs", "list"]
PAIR = "{candidates}\n\n"
RUBRIC = "Compare the answers: which is right, and which answers better what was asked? Their order means nothing."
WINNER = VerdictRule(form="words", words={"first": 1.0, "second": 0.0, "tie": 0.5})


@dataclass(kw_only=True, eq=False)
class GenRMGroup(Judge):
    """How good a language model finds an answer beside the others of its group, from 0 to 1.

    Every comparison is made in both orders, or in several, as judges prefer places; `metrics()` says how much.

    Attributes:
        mode: "pairs" asks which of two is better, and the score is the share of comparisons won, a tie being half of
            one; "list" shows all at once and has each scored from 0 to 10.
        opponents: [pairs] each is compared with so many others; 0: with all.
        orders: [list] how many orders the answers are shown in.
        field: where in info the right answer is; "" compares without one.
        rubric, rubric_file: what to judge by, as text or in a file.
    """

    mode: Mode = "pairs"
    opponents: int = 0
    orders: int = 2
    field: str = ""
    rubric: str = ""
    rubric_file: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode not in get_args(Mode):
            raise RewardError(f"genrm_group: mode = {self.mode!r}; give one of {', '.join(get_args(Mode))}")
        if self.opponents < 0 or self.orders < 1:
            raise RewardError("genrm_group: opponents must be 0 or more, orders at least 1")
        self._rubric = inline_or_file("rubric", self.rubric, self.rubric_file) or RUBRIC
        self._first: list[float] = []
        self._contradicted: list[float] = []

    def metrics(self) -> dict[str, float]:
        """As of every judge; of pairs also `first_wins`, how often what was shown first won (1/2 without bias), and
        `contradicted`, the share of pairs whose verdict changed with the order."""
        lists = {"first_wins": self._first, "contradicted": self._contradicted}
        self._first, self._contradicted = [], []
        return super().metrics() | {name: statistics.fmean(values) for name, values in lists.items() if values}

    async def score_group(self, trajectories: Sequence[Trajectory], /) -> list[float | RewardError]:
        """A score for each episode of a group, or why it has none. Two at least can be compared."""
        found: list[float | RewardError] = [RewardError("there is nothing to compare it with")] * len(trajectories)
        there = [at for at, one in enumerate(trajectories) if one.turns]
        for at in set(range(len(trajectories))) - {*there}:
            found[at] = RewardError("the episode has no turns, so no answer")
        if len(there) > 1:
            compare = self._pairs if self.mode == "pairs" else self._list
            for at, score in zip(there, await compare([trajectories[at] for at in there]), strict=True):
                found[at] = score
        return found

    async def _pairs(self, group: Sequence[Trajectory]) -> list[float | RewardError]:
        count = len(group)
        reach = min(self.opponents or count, count - 1)
        pairs = sorted({(min(i, j), max(i, j)) for i in range(count) for j in _next(i, reach, count)})
        won = await asyncio.gather(*(self._pair(group[i], group[j]) for i, j in pairs))
        scores: defaultdict[int, list[float]] = defaultdict(list)
        why = RewardError("it was compared with nothing")
        for (i, j), share in zip(pairs, won, strict=True):
            if isinstance(share, RewardError):
                why = share
            else:
                scores[i].append(share)
                scores[j].append(1.0 - share)
        return [statistics.fmean(scores[i]) if scores[i] else why for i in range(count)]

    async def _pair(self, one: Trajectory, other: Trajectory) -> float | RewardError:
        """How much of a comparison the first has won, 0 to 1; two equal answers are a tie, and nobody is asked."""
        if final_action(one) == final_action(other):
            return 0.5
        questions = [self._question([one, other], WINNER), self._question([other, one], WINNER)]
        asked = await asyncio.gather(*(self._asked(question) for question in questions))
        wins = [answer if isinstance(answer, RewardError) else statistics.fmean(answer) for answer in asked]
        for win in wins:  # one order alone would carry the bias that the other is there to cancel
            if isinstance(win, RewardError):
                return win
        ahead, behind = (float(win) for win in wins if not isinstance(win, RewardError))
        self._first += [ahead, behind]
        self._contradicted.append(float(ahead != 1.0 - behind))
        return (ahead + 1.0 - behind) / 2

    async def _list(self, group: Sequence[Trajectory]) -> list[float | RewardError]:
        count = len(group)
        if count > len(ascii_uppercase):
            return [RewardError(f'{count} answers at once are too many; set mode = "pairs"')] * count
        step = max(1, count // self.orders)
        orders = [[(at + turn * step) % count for at in range(count)] for turn in range(min(self.orders, count))]
        asked = await asyncio.gather(*(self._asked(self._question([group[at] for at in o], None)) for o in orders))
        faults = [samples for samples in asked if isinstance(samples, RewardError)]
        if 2 * len(faults) >= len(orders):  # what is left would carry the bias that other orders are there to cancel
            return [faults[0]] * count
        scores: list[list[float]] = [[] for _ in group]
        for order, samples in zip(orders, asked, strict=True):
            for sample in [] if isinstance(samples, RewardError) else samples:
                for place, score in zip(order, sample, strict=True):
                    scores[place].append(score)
        for values in scores:
            self.note_spread(values)
        return [statistics.fmean(values) for values in scores]

    async def _asked(self, question: Question) -> list[Any] | RewardError:
        try:
            return await self.ask(question)
        except RewardError as error:
            return error

    def _question(self, shown: Sequence[Trajectory], rule: VerdictRule | None) -> Question:
        """Which of two is better (with a rule), or how good each is; they are shown in this order."""
        names = ["first", "second"] if rule else [f"answer_{letter}" for letter in ascii_uppercase[: len(shown)]]
        texts = {"question": first_question(shown[0])}
        if self.field:
            texts["reference"] = str(reference(shown[0], self.field))
        answers = dict(zip(names, map(final_action, shown), strict=True))
        letters = ascii_uppercase[: len(shown)]

        def render(mark: str) -> str:
            frame = partial(self.framer.framed, mark=mark)
            framed = {name: partial(frame, name, text) for name, text in texts.items()}
            return fill(
                QUESTION + (REFERENCE if self.field else "") + "The answers:\n\n" + PAIR + ENDING,
                {
                    **framed,
                    "candidates": lambda: "\n\n".join(frame(name, text) for name, text in answers.items()),
                    "rubric": lambda: self._rubric,
                    "verdict": lambda: rule.instruction(mark) if rule else _scores_wanted(letters, mark),
                },
            )

        return Question(
            texts=[*texts.values(), *answers.values()],
            render=render,
            read=rule.read if rule else partial(_read_scores, letters=letters),
            facts=facts_of(rule or WINNER, self.framer) | {"mode": self.mode},
        )


def _next(at: int, reach: int, count: int) -> Sequence[int]:
    return [(at + distance) % count for distance in range(1, reach + 1)]


def _scores_wanted(letters: str, mark: str) -> str:
    scores = ", ".join(f'"{letter}": n' for letter in letters)
    return (
        "Think first. Then end with one JSON object with a score n from 0 to 10 for each answer:\n"
        f'{{"mark": "{mark}", {scores}}}'
    )


def _read_scores(reply: str, mark: str, *, letters: str) -> list[float]:
    """One score from 0 to 1 for each letter. Raises NoVerdict for anything but one whole object with this mark."""
    found: list[Mapping[str, Any]] = []
    for text in OBJECT.findall(reply):
        try:
            value = json.loads(text)
        except ValueError:
            continue
        if value.get("mark") == mark:
            found.append(value)
    if not found or any(value != found[0] for value in found):
        raise NoVerdict(f"the judge gave {len(found)} objects with mark {mark}: {reply[-200:]!r}")
    scores = [found[0].get(letter) for letter in letters]
    if wrong := [s for s in scores if isinstance(s, bool) or not isinstance(s, int | float) or not 0 <= s <= 10]:
        raise NoVerdict(f"the judge gave {wrong[0]!r:.80} as a score; the scale is 0 to 10")
    return [score / 10 for score in scores if score is not None]
