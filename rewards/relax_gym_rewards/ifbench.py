"""How many of its instructions an answer follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from relax_gym.errors import RewardError, suggestion
from relax_gym.types import Trajectory
from relax_gym_rewards._answers import answer_text, choice_option
from relax_gym_rewards._episode import reference
from relax_gym_rewards._instructions import CHECKS, RELATIONS

LONGEST = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class IFBench:
    """The share of `info[field]` that the last action follows, thinking left out; with `score = "all"`, all or nothing.

    As in IFEval (arXiv 2311.07911) and IFBench (arXiv 2507.02833) a program can verify each. `info[field]` is a list
    such as `{"kind": "words", "relation": "at most", "count": 50}`; docs/rewards.md has the kinds. An empty answer
    follows none, nor does one of more than 100,000 characters.
    """

    field: str = "instructions"
    score: str = "share"

    def __post_init__(self) -> None:
        choice_option("ifbench", "score", self.score, ("share", "all"))

    def __call__(self, trajectory: Trajectory, /) -> float:
        value = reference(trajectory, self.field)
        if not isinstance(value, (list, tuple)) or not value:
            raise RewardError(
                f"ifbench: info[{self.field!r}] is {value!r:.100}; it must be a list of instructions such as "
                "{'kind': 'no_commas'}"
            )
        instructions = [checked(instruction) for instruction in value]
        text = answer_text(trajectory).strip()
        if not text or len(text) > LONGEST:
            return 0.0
        followed = [CHECKS[instruction["kind"]].followed(text, instruction) for instruction in instructions]
        return float(all(followed)) if self.score == "all" else sum(followed) / len(followed)


def checked(instruction: Any) -> Mapping[str, Any]:
    """An instruction whose kind and arguments are right. Raises RewardError saying what is wrong with it."""
    if not isinstance(instruction, Mapping) or not isinstance(instruction.get("kind"), str):
        raise RewardError(f"ifbench: an instruction is {instruction!r:.100}; it must be a mapping with a 'kind'")
    kind = instruction["kind"]
    if kind not in CHECKS:
        raise RewardError(f"ifbench: there is no kind {kind!r}{suggestion(kind, CHECKS)}")
    needs = CHECKS[kind].needs
    given = {name: value for name, value in instruction.items() if name != "kind"}
    wrong = [name for name in needs if not _is(given.get(name), needs[name])]
    if wrong or set(given) != set(needs):
        wanted = ", ".join(f"{name} ({needs[name].__name__})" for name in needs) or "no arguments"
        raise RewardError(f"ifbench: {kind!r} has the arguments {given!r:.200}; it takes {wanted}")
    if "relation" in given and given["relation"] not in RELATIONS:
        choice_option("ifbench", f"relation of {kind!r}", given["relation"], tuple(RELATIONS))
    return instruction


def _is(value: Any, kind: type) -> bool:
    if kind is list:
        return (
            isinstance(value, (list, tuple)) and bool(value) and all(isinstance(item, str) and item for item in value)
        )
    return isinstance(value, kind) and not isinstance(value, bool) and value != ""
