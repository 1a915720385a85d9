"""Where the answer stands in what a model said. Every function takes time linear in the text."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from decimal import Decimal
from numbers import Real
from typing import Any

from relax_gym.errors import RewardError
from relax_gym.types import Trajectory
from relax_gym_rewards._episode import final_action, reference

BOXES = ("\\boxed{", "\\fbox{", "\\boxed {")


def spoken(text: str) -> str:
    """The text without its `<think>` blocks. One without an end hides the rest, one without a start what precedes."""
    before, closed, after = text.partition("</think>")
    if closed and "<think>" not in before:  # the prompt ended with the tag
        text = after
    aloud, *hidden = text.split("<think>")
    return aloud + "".join(block.partition("</think>")[2] for block in hidden)


def answer_text(trajectory: Trajectory) -> str:
    """What the model said last, aloud. Raises RewardError when it said nothing."""
    return spoken(final_action(trajectory))


def tagged(text: str, tag: str = "answer") -> str | None:
    """What stands in the last closed `<tag>`; None when there is none."""
    before, closed, _ = text.rpartition(f"</{tag}>")
    if not closed:
        return None
    _, opened, inside = before.rpartition(f"<{tag}>")
    return inside.strip() if opened else None


def boxed(text: str) -> str | None:
    r"""What stands in the last `\boxed{…}` with balanced braces; None when there is none."""
    starts = [(text.rfind(box), len(box)) for box in BOXES]
    start, length = max(starts)
    if start < 0:
        return None
    depth = 1
    for end in range(start + length, len(text)):
        if text[end] in "{}" and text[end - 1] != "\\":
            depth += 1 if text[end] == "{" else -1
        if depth == 0:
            return text[start + length : end].strip()
    return None


def stated_answer(text: str) -> str:
    """What stands in the last `<answer>` tag, else the whole text."""
    inside = tagged(text)
    return text.strip() if inside is None else inside


def references(trajectory: Trajectory, field: str, reward: str) -> list[str]:
    """The texts that `info[field]` allows. Raises RewardError when it is not a text, a number or a list of these."""
    value = reference(trajectory, field)
    items: Sequence[Any] = value if isinstance(value, (list, tuple)) else [value]
    if not items or not all(isinstance(item, (str, Real, Decimal)) and not isinstance(item, bool) for item in items):
        raise RewardError(
            f"{reward}: info[{field!r}] is {value!r:.100}; it must be a text, a number or a list of these: "
            "let the env leave one, or set field = …"
        )
    return [str(item) for item in items]


def number_option(
    reward: str, name: str, value: Any, low: float, high: float, *, low_allowed: bool = True, integer: bool = False
) -> None:
    """Raises RewardError unless `value` is a number between `low` and `high`."""
    kind = "a whole number" if integer else "a number"
    bad_type = isinstance(value, bool) or not isinstance(value, int if integer else (int, float))
    if bad_type or not low <= value <= high or (value == low and not low_allowed):
        start = "from" if low_allowed else "above"
        raise RewardError(f"{reward}: {name} is {value!r}; it must be {kind} {start} {low:g} to {high:g}")


def choice_option(reward: str, name: str, value: Any, allowed: Sequence[Any]) -> None:
    """Raises RewardError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise RewardError(f"{reward}: {name} is {value!r}; it must be one of {', '.join(map(repr, allowed))}")


def library(name: str, reward: str) -> Any:
    """The module `name`. Raises RewardError naming the extra that brings it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise RewardError(f"{reward} needs {name}; run: pip install 'relax-gym[rewards]'") from error
