"""Reading numbers out of what a model wrote, and checking constructor arguments."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal

from relax_gym.errors import ConfigError, suggestion

# A minus sign counts where it cannot be a subtraction or a hyphen, commas only between groups of three digits.
_NUMBER = re.compile(
    r"(?:(?<![\w.)])[-−]\$?)?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![\w.])[-−]?\.[0-9]+"
)


def last_number(text: str) -> Decimal | None:
    """The last number in a text (`"so -1,234.50."` → -1234.50), or None. Never raises, whatever the text."""
    last = ""
    for found in _NUMBER.finditer(text):
        last = found[0]
    return Decimal(last.translate(_PLAIN)) if last else None


_PLAIN = str.maketrans({",": None, "$": None, "−": "-"})


def check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    """Raise ConfigError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}{suggestion(str(value), allowed)}")


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Raise ConfigError unless `value` is a number in [low, high]; a whole number when `low` is an int."""
    kind, allowed = ("whole number", int) if isinstance(low, int) else ("number", (int, float))
    if isinstance(value, bool) or not isinstance(value, allowed) or not low <= value <= high:
        raise ConfigError(f"{name} is {value!r}; it must be a {kind} from {low} to {high}")
