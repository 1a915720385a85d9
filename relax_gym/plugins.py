"""Finds plugins, asks their hooks, owns the tables. Built-ins come in by the same door as strangers."""

from __future__ import annotations

import functools
import importlib
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

import pluggy

from relax_gym import hookspecs
from relax_gym.errors import PluginError, suggestion
from relax_gym.registry import EnvSpec, Registry, add_to_gymnasium

BUILT_IN = ("relax_gym_envs", "relax_gym_rewards", "relax_gym_trainers", "relax_gym_plugins")
KINDS = {
    "register_rewards": "reward",
    "register_algorithms": "algorithm",
    "register_learners": "learner",
    "register_samplers": "sampler",
    "register_queues": "queue",
    "register_launchers": "launcher",
    "register_trackers": "tracker",
    "register_notifiers": "notifier",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenPlugin:
    """A third-party plugin that could not be used, and why."""

    name: str
    source: str
    error: str
    traceback: str


class Plugins:
    """All loaded plugins and what they registered."""

    def __init__(self) -> None:
        self.manager = pluggy.PluginManager(hookspecs.PROJECT)
        self.manager.add_hookspecs(hookspecs)
        self.sources: dict[str, str] = {}
        self.broken: list[BrokenPlugin] = []
        self.envs = Registry("env")
        self.tables = {kind: Registry(kind) for kind in KINDS.values()}
        for name in BUILT_IN:
            self.add(importlib.import_module(name), name, "relax-gym")
        for entry in sorted(entry_points(group=hookspecs.PROJECT), key=lambda e: e.name):
            source = f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value
            try:
                self.add(entry.load(), entry.name, source)
            except PluginError:
                raise
            except Exception as error:
                self._report(entry.name, source, error)

    def add(self, plugin: object, name: str, source: str) -> None:
        """Register one plugin object and collect what its hooks return.

        Raises:
            PluginError: a misspelt hook, or a name another plugin has registered.
        """
        self.manager.register(plugin, name)
        self._check_spelling(plugin, source)
        self.sources[name] = source
        for hook, values in self._registrations(plugin, source, name):
            for key, value in values.items():
                if hook == "register_envs":
                    spec = value if isinstance(value, EnvSpec) else EnvSpec(id=key, entry_point=value)
                    self.envs.add(key, spec, source)
                    add_to_gymnasium(spec)
                else:
                    self.tables[KINDS[hook]].add(key, value, source)

    def _registrations(self, plugin: object, source: str, name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for hook in ("register_envs", *KINDS):
            for impl in getattr(self.manager.hook, hook).get_hookimpls():
                if impl.plugin is not plugin:
                    continue
                try:
                    values = dict(impl.function())
                except Exception as error:
                    if source == "relax-gym":
                        raise
                    self._report(name, source, error)
                    continue
                yield hook, values

    def _check_spelling(self, plugin: object, source: str) -> None:
        known = [name for name in vars(hookspecs) if name.startswith(("register_", "on_"))]
        for attribute in dir(plugin):
            value = getattr(plugin, attribute, None)
            if getattr(value, f"{hookspecs.PROJECT}_impl", None) and attribute not in known:
                raise PluginError(f"{source} implements an unknown hook {attribute!r}{suggestion(attribute, known)}")
        self.manager.check_pending()

    def _report(self, name: str, source: str, error: Exception) -> None:
        message = f"{type(error).__name__}: {error}"
        self.broken.append(BrokenPlugin(name=name, source=source, error=message, traceback=traceback.format_exc()))

    def get(self, kind: str, name: str) -> Any:
        """What a plugin registered under a name; `kind` is one of the values of KINDS."""
        return self.tables[kind].get(name)

    @property
    def hook(self) -> Any:
        """Pluggy's hook callers, for the observers."""
        return self.manager.hook


@functools.cache
def plugins() -> Plugins:
    """The process's plugins, loaded once."""
    return Plugins()
