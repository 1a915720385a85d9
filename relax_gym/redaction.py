"""Options that a plugin declares as pydantic's SecretStr are never written to a run folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import AliasChoices, AliasPath, BaseModel, Secret, SecretBytes, SecretStr
from pydantic.fields import FieldInfo

from relax_gym.config import RunConfig, component_sections, plugin_options
from relax_gym.errors import ConfigError
from relax_gym.plugins import plugins

MASK = "**********"
"""What pydantic shows for a secret, and what stands in a run folder for one."""

Key = tuple[str | int, ...]
"""Where a value is in the config: names in sections, positions in lists."""


def secrets(config: RunConfig) -> dict[Key, str]:
    """The secret options of all plugins: their key in the config → their value."""
    found: dict[Key, str] = {}
    for kind, key, section in component_sections(config):
        options = plugin_options(section, plugins().get(kind, section.name).load_options(), source="config", key=key)
        start = tuple(int(part) if part.isdigit() else part for part in key.split("."))
        found |= {(*start, *rest): str(value) for rest, value in _hidden(options, section.options)}
    return found


def masked(config: RunConfig, *, exclude_none: bool = False) -> dict[str, Any]:
    """The config as data for JSON and TOML, without the secrets in it."""
    data = config.model_dump(mode="json", exclude_none=exclude_none)
    for (*parents, last), _ in secrets(config).items():
        node: Any = data
        for part in parents:
            node = node[part]
        node[last] = MASK
    return data


def mask_text(config: RunConfig, text: str) -> str:
    """A text such as a command line, without the secrets of the config in it."""
    for secret in filter(None, secrets(config).values()):
        text = text.replace(secret, MASK)
    return text


def check_secrets(config: RunConfig, section: str | None = None) -> None:
    """Raise ConfigError when a config (or one section of it) has the masks of a run folder in place of its secrets."""
    for parts, value in secrets(config).items():
        if value == MASK and section in (None, parts[0]):
            key = ".".join(map(str, parts))
            raise ConfigError(f"{key} is a secret, which run folders do not keep; give it with --set {key}=…")


def _hidden(value: Any, given: Any) -> Iterator[tuple[Key, Any]]:
    """(key, what was given) of every secret in a checked value, found in what it was made from."""
    if isinstance(value, (Secret, SecretStr, SecretBytes)):
        yield (), given
    elif isinstance(value, BaseModel):
        for name, item in value:
            for key in _names(name, type(value).model_fields.get(name)):
                yield from _below(key, item, given)
    elif isinstance(value, Mapping) and isinstance(given, Mapping):
        for key, item in zip(given, value.values(), strict=False):  # a checked key may be of another type
            yield from _below((key,), item, given)
    elif isinstance(value, (list, tuple, set, frozenset)) and isinstance(given, (list, tuple)):
        items = list(value)
        for index in range(len(given) if items else 0):  # a set may have fewer than were given
            yield from _below((index,), items[min(index, len(items) - 1)], given)


def _below(key: Key, value: Any, given: Any) -> Iterator[tuple[Key, Any]]:
    for part in key:
        try:
            given = given[part]
        except (LookupError, TypeError):
            return  # a default, or given by another name
    for rest, secret in _hidden(value, given):
        yield (*key, *rest), secret


def _names(name: str, field: FieldInfo | None) -> Iterator[Key]:
    """Where a field's value may stand: under its name and its aliases."""
    yield (name,)
    alias = field.validation_alias if field else None
    for choice in alias.choices if isinstance(alias, AliasChoices) else (alias,):
        if choice not in (None, name):
            yield tuple(choice.path) if isinstance(choice, AliasPath) else (choice,)
