"""The config that a run folder keeps, every default written out and secrets masked, and what a resume may change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError

from relax_gym.config import PluginSection, RunConfig, component_sections, read_toml, validate
from relax_gym.errors import RunFolderError
from relax_gym.plugins import plugins
from relax_gym.redaction import MASK, masked, secrets

MAY_CHANGE = {
    *(
        "run_dir",
        "threads",
        "eval",
        "checkpoint",
        "supervision",
        "timeline",
        "trackers",
        "train.steps",
        "media.keep_gib",
    ),
    *("rollout.step_timeout", "rollout.episode_timeout", "rollout.reward_timeout"),
}
"""Keys and sections with which a run may go on that began with others; plugins add `Options.may_change`."""


def config_to_keep(config: RunConfig) -> dict[str, Any]:
    """The config as data for TOML. A plugin that would not read its own defaults again has what it was given."""
    data = masked(config, exclude_none=True)
    _write_defaults(data, config)
    return data


def kept_config(path: Path) -> RunConfig:
    """The config that a run folder keeps. Plugins do not check it: they might refuse the masks of their secrets."""
    return validate(RunConfig, read_toml(path), source=str(path))


def check_same_run(config: RunConfig, path: Path) -> None:
    """Raise RunFolderError, naming what differs, unless a run folder holds the run that a config would go on with."""
    if not (path / "config.toml").exists():
        raise RunFolderError(f"nothing to resume: {str(path)!r} holds no run; leave out --resume to start one")
    there = kept_config(path / "config.toml").model_dump(mode="json", exclude_none=True)
    _write_defaults(there, config)  # that of an older version may lack some
    free = MAY_CHANGE | {
        f"{key}.{option}"
        for kind, key, section in component_sections(config)
        for option in plugins().get(kind, section.name).load_options().may_change
    }
    changed = [
        f"{key}: {'not set' if old is None else repr(old)} there, {'not set' if new is None else repr(new)} here"
        for key, old, new in _differences(there, config_to_keep(config))
        if not any(key == one or key.startswith(f"{one}.") for one in free)
    ]
    if changed:
        raise RunFolderError(f"{str(path)!r} holds another run ({'; '.join(changed)}); resume it with its own config")


def _write_defaults(data: dict[str, Any], config: RunConfig) -> None:
    """Write all options of the plugins that a config names into its data, or into those of a config of the same run."""
    hidden = [*filter(None, secrets(config).values())]
    for key, section, model in _plugin_sections(config):
        *parents, last = (int(part) if part.isdigit() else part for part in key.split("."))
        holder: Any = data
        try:
            for part in parents:
                holder = holder[part]
            found = {"name": holder[last]} if isinstance(holder[last], str) else holder[last]
        except (LookupError, TypeError):
            continue  # the other config has no such section
        given = {name: value for name, value in found.items() if name != "name"}
        options = _all_options(model, _unmasked(given, section.options)) if found["name"] == section.name else None
        if options is not None and not any(secret in str(options) for secret in hidden):
            holder[last] = {"name": section.name, **options}


def _plugin_sections(config: RunConfig) -> Iterator[tuple[str, PluginSection, type[BaseModel]]]:
    """(key, section, model of its options) of every plugin in a config, outer ones first."""
    yield "algorithm", config.algorithm, plugins().get("algorithm", config.algorithm.name)
    for index, env in enumerate(config.env):
        if env.algorithm is not None:
            yield f"env.{index}.algorithm", env.algorithm, plugins().get("algorithm", env.algorithm.name)
    for kind, key, section in component_sections(config):
        yield key, section, plugins().get(kind, section.name).load_options()


def _all_options(model: type[BaseModel], given: Mapping[str, Any]) -> dict[str, Any] | None:
    """The options that a plugin makes of those given, if it would read them again."""
    try:
        options = model.model_validate(given)
        data = options.model_dump(mode="json", exclude_none=True, warnings=False)
        return data if model.model_validate(_unmasked(data, given)) == options else None
    except (ValidationError, PydanticSerializationError):
        return None


def _unmasked(kept: Any, given: Any) -> Any:
    """What was kept, with the secrets that were given."""
    if kept == MASK:
        return given
    if isinstance(kept, Mapping) and isinstance(given, Mapping):
        return {key: _unmasked(value, given.get(key)) for key, value in kept.items()}
    if isinstance(kept, (list, tuple)) and isinstance(given, (list, tuple)) and len(kept) == len(given):
        return [_unmasked(*pair) for pair in zip(kept, given, strict=True)]
    return kept


def _differences(there: Any, here: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(key, value there, value here) of all that differs; None for what is not set."""
    if isinstance(there, dict) and isinstance(here, dict):
        other = there.get("name") != here.get("name")  # of another plugin or model all the rest may differ
        for name in ("name",) if other else {**there, **here}:
            yield from _differences(there.get(name), here.get(name), f"{key}.{name}".removeprefix("."))
    elif isinstance(there, list) and isinstance(here, list) and len(there) == len(here):
        for index, pair in enumerate(zip(there, here, strict=True)):
            yield from _differences(*pair, f"{key}.{index}")
    elif there != here:
        yield key, there, here
