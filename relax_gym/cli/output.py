"""Tables and key=value arguments, for all commands."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Sequence
from typing import Any

import typer

from relax_gym.errors import ConfigError

PIPE_WIDTH = 500


def new_app(help: str) -> typer.Typer:
    """A group of commands. Help is plain text: drawing boxes costs a third of the time that `--help` takes."""
    return typer.Typer(
        help=help, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
    )


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table for people. Cells are printed as they are: no markup in them is interpreted."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from relax_gym.view import printable

    table = Table(box=None, padding=(0, 3, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(str(cell))) for cell in row))
    width = None if sys.stdout.isatty() else PIPE_WIDTH  # a pipe has no width; folded cells would break `grep`
    Console(width=width).print(table)


def parse_kwargs(pairs: Sequence[str], *, option: str = "--kwargs") -> dict[str, Any]:
    """`["level=3", "style=terse"]` → mapping; values are TOML, anything else is a string.

    Raises:
        ConfigError: a pair without `=`.
    """
    from relax_gym.overrides import parse_value

    kwargs = {}
    for pair in pairs:
        key, separator, text = pair.partition("=")
        if not separator or not key.strip():
            raise ConfigError(f"{option} {pair!r} is malformed; write {option} key=value")
        kwargs[key.strip()] = parse_value(text)
    return kwargs


def as_toml(value: Any) -> str:
    """A default as a config would give it, as far as there is a way to."""
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(as_toml, value))}]"
    return json.dumps(value) if isinstance(value, bool | str) else repr(value)


def documentation(thing: object) -> str:
    """A docstring of its own; what a base class says about subclassing is no documentation of the subclass."""
    return inspect.cleandoc(thing.__doc__ or "")
