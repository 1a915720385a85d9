"""What a judge says → a number. A verdict counts only with the mark of its request."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from relax_gym.errors import RewardError

Form = Literal["scale", "words", "json"]
NUMBER = re.compile(r"[-+]?[0-9]+(?:\.[0-9]+)?")
OBJECT = re.compile(r"\{[^{}]*\}")


class NoVerdict(ValueError):
    """A reply holds no verdict that can be used; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictRule:
    """How a verdict is asked for and read.

    "scale": a line `Score MARK: n`, low ≤ n ≤ high. "words": a line `Verdict MARK: word`, worth what `words` says.
    "json": an object with the field `json_field`, a number on the scale or one of `words` if there are some, and with
    the mark in "mark". Numbers become (n − low) / (high − low) unless `normalise` is off.
    """

    form: Form = "scale"
    low: float = 0.0
    high: float = 10.0
    normalise: bool = True
    words: Mapping[str, float] = field(default_factory=dict)
    json_field: str = "score"

    def __post_init__(self) -> None:
        if self.form not in get_args(Form):
            raise RewardError(f"genrm: parse = {self.form!r}; give one of {', '.join(get_args(Form))}")
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise RewardError(f"genrm: the scale is {self.low} to {self.high}; low must be below high, both finite")
        if self.form == "scale" and self.words:
            raise RewardError('genrm: words are for parse = "words" and parse = "json"; leave them out of a scale')
        if self.form == "words" and len(self.words) < 2:
            raise RewardError(f"genrm: words is {dict(self.words)}; give two or more, e.g. {{correct = 1, wrong = 0}}")
        if wrong := {word: worth for word, worth in self.words.items() if not _is_number(worth)}:
            raise RewardError(f"genrm: words has {wrong}; each word is worth a finite number")

    def instruction(self, mark: str) -> str:
        """What the judge is told about the form of its verdict."""
        scale, words = f"a number from {self.low:g} to {self.high:g}", " or ".join(self.words)
        if self.form == "json":
            what = f'"{self.json_field}": {words or scale}'
            return f'Think first. Then end with one JSON object: {{"mark": "{mark}", {what}}}'
        name, what = ("Verdict", words) if self.form == "words" else ("Score", scale)
        return f"Think first. Then end with one line of exactly this form:\n{name} {mark}: {what}"

    def read(self, reply: str, mark: str) -> float:
        """The number of the one verdict with this mark. Raises NoVerdict for none, or for several that differ."""
        said = self._objects(reply, mark) if self.form == "json" else self._lines(reply, mark)
        if not said:
            raise NoVerdict(f"the judge gave no verdict with mark {mark}: {reply[-200:]!r}")
        values = {self._worth(one) for one in said}
        if len(values) > 1:
            raise NoVerdict(f"the judge gave several verdicts: {', '.join(map(str, said))}")
        return values.pop()

    def _lines(self, reply: str, mark: str) -> list[Any]:
        name = "Verdict" if self.form == "words" else "Score"
        found = re.findall(rf"^[\s*_#>`]*{name}[ -]{mark}[*_`]*:(.*)$", reply, re.IGNORECASE | re.MULTILINE)
        return [line.strip(" \t\r*_`.\"'") for line in found]

    def _objects(self, reply: str, mark: str) -> list[Any]:
        found = []
        for text in OBJECT.findall(reply):
            try:
                value = json.loads(text)
            except ValueError:
                continue
            if value.get("mark") == mark and self.json_field in value:
                found.append(value[self.json_field])
        return found

    def _worth(self, said: Any) -> float:
        if self.words:
            worth = {word.casefold(): value for word, value in self.words.items()}
            word = str(said).strip().casefold()
            if word not in worth:
                raise NoVerdict(f"the judge said {said!r:.100}, which is none of {', '.join(self.words)}")
            return float(worth[word])
        text = str(said).removesuffix(f"/{self.high:g}").strip()
        number = float(text) if NUMBER.fullmatch(text) else math.nan
        if isinstance(said, bool) or not self.low <= number <= self.high:
            raise NoVerdict(f"the judge said {said!r:.100}; the scale is {self.low:g} to {self.high:g}")
        return (number - self.low) / (self.high - self.low) if self.normalise else number


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
