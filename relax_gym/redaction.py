"""Options that a plugin declares as pydantic's SecretStr are never written to a run folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from relax_gym.config import RunConfig, component_sections, plugin_options
from relax_gym.errors import ConfigError
from relax_gym.plugins import plugins

MASK = "**********"
"""What pydantic shows for a secret, and what stands in a run folder for one."""


def secrets(config: RunConfig) -> dict[str, str]:
    """The secret options of all plugins: their key in the config → their value."""
    found: dict[str, str] = {}
    for kind, key, section in component_sections(config):
        model = plugins().get(kind, section.name).load_options()
        shown = plugin_options(section, model, source="config", key=key).model_dump(mode="json")
        found |= _hidden(key, section.options, shown)
    return found


def masked(config: RunConfig, *, exclude_none: bool = False) -> dict[str, Any]:
    """The config as data for JSON and TOML, without the secrets in it."""
    data = config.model_dump(mode="json", exclude_none=exclude_none)
    for key in secrets(config):
        node: Any = data
        *parents, last = key.split(".")
        for part in parents:
            node = node[int(part)] if isinstance(node, list) else node[part]
        node[last] = MASK
    return data


def mask_text(config: RunConfig, text: str) -> str:
    """A text such as a command line, without the secrets of the config in it."""
    for secret in filter(None, secrets(config).values()):
        text = text.replace(secret, MASK)
    return text


def check_secrets(config: RunConfig) -> None:
    """Raise ConfigError when a config comes from a run folder, which keeps no secrets, without new ones."""
    for key, value in secrets(config).items():
        if value == MASK:
            raise ConfigError(f"{key} is a secret, which run folders do not keep; give it with --set {key}=…")


def _hidden(key: str, raw: Mapping[str, Any], shown: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in raw.items():
        if shown.get(name) == MASK:
            yield f"{key}.{name}", str(value)
        elif isinstance(value, Mapping) and isinstance(shown.get(name), Mapping):
            yield from _hidden(f"{key}.{name}", value, shown[name])
