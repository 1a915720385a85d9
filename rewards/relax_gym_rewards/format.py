"""1 when what the model wrote has its tags in order, else 0."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from relax_gym.errors import RewardError
from relax_gym.types import Trajectory
from relax_gym_rewards._answers import choice_option
from relax_gym_rewards._episode import final_action

TAG_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


def in_order(text: str, tags: Sequence[str], *, opened: bool = False, outside: bool = False) -> bool:
    """Whether each of `tags` stands in `text` once, in this order, closed, not nested and with something inside.

    `opened`: the prompt ended with the first tag. `outside`: text may stand between, before and after the tags.
    """
    text = f"<{tags[0]}>{text}" if opened else text
    found = list(re.finditer(rf"</?(?:{'|'.join(tags)})>", text))
    if [mark[0] for mark in found] != [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]:
        return False
    cuts = [0, *(edge for mark in found for edge in mark.span()), len(text)]
    pieces = [text[start:end].strip() for start, end in zip(cuts[::2], cuts[1::2], strict=True)]
    return all(pieces[1::2]) and (outside or not any(pieces[::2]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """Each of `tags` once, in this order, closed, not nested, not empty, and nothing beside them.

    Looks at the whole text of the last turn, thinking included; with `turns = "all"` the score is the share of turns.
    `outside` allows text beside the tags. `opened`: the chat template already wrote the first tag.
    """

    tags: Sequence[str] = ("think", "answer")
    outside: bool = False
    opened: bool = False
    turns: str = "last"

    def __post_init__(self) -> None:
        choice_option("format", "turns", self.turns, ("last", "all"))
        names = [] if isinstance(self.tags, str) else list(self.tags)
        if not names or len(set(names)) != len(names) or not all(TAG_NAME.fullmatch(str(name)) for name in names):
            raise RewardError(
                f"format: tags is {self.tags!r}; it must be a list of different names, such as ['think', 'answer']"
            )

    def __call__(self, trajectory: Trajectory, /) -> float:
        final_action(trajectory)  # an episode without turns has no format
        turns = trajectory.turns if self.turns == "all" else trajectory.turns[-1:]
        good = [in_order(turn.text, self.tags, opened=self.opened, outside=self.outside) for turn in turns]
        return sum(good) / len(good)
