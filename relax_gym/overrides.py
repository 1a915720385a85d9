"""`dotted.key=value`, as typed on the command line, into a config."""

from __future__ import annotations

import tomllib
from typing import Any

from relax_gym.errors import ConfigError


def parse_value(text: str) -> Any:
    """A value as typed on the command line: TOML when it is, else the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def apply_override(data: dict[str, Any], override: str) -> None:
    """Set one `dotted.key=value` in a config. Raises ConfigError when it is malformed or leads nowhere."""
    key, separator, text = override.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"--set {override!r} is malformed; write --set section.key=value")
    value = parse_value(text)
    node: Any = data
    *parents, last = key.strip().split(".")
    for part in parents:
        if isinstance(node, list):
            node = _item(node, part, override)
        else:
            node = node.setdefault(part, {})
        if not isinstance(node, (dict, list)):
            raise ConfigError(f"--set {override!r}: {part!r} is a value, not a section")
    if isinstance(node, list):
        _item(node, last, override)
        node[int(last)] = value
    else:
        node[last] = value


def _item(node: list[Any], index: str, override: str) -> Any:
    if not index.isdigit() or int(index) >= len(node):
        raise ConfigError(f"--set {override!r}: {index!r} is not an index of a list of {len(node)}")
    return node[int(index)]
