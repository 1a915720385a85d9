"""Finds plugins, asks their hooks, owns the tables. Built-ins come in by the same door as strangers."""

from __future__ import annotations

import functools
import importlib
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from typing import Any, TypeVar

import pluggy

from relax_gym import hookspecs
from relax_gym.errors import PluginError, reason, suggestion
from relax_gym.registry import EnvSpec, Registry, add_to_gymnasium, registered

T = TypeVar("T")
BUILT_IN = ("relax_gym_envs", "relax_gym_rewards", "relax_gym_trainers", "relax_gym_plugins")
KINDS = {
    "register_envs": "env",
    "register_rewards": "reward",
    "register_algorithms": "algorithm",
    "register_learners": "learner",
    "register_samplers": "sampler",
    "register_teachers": "teacher",
    "register_trackers": "tracker",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenPlugin:
    """A third-party plugin, or the `part` of one, that could not be used, and why."""

    name: str
    source: str
    part: str = ""
    error: str
    traceback: str

    @property
    def what(self) -> str:
        """Plugin, distribution and part, for messages."""
        return f"{self.part}{' of ' if self.part else ''}plugin {self.name!r} of {self.source}"


class Plugins:
    """All loaded plugins and what they registered."""

    def __init__(self) -> None:
        self.manager = pluggy.PluginManager(hookspecs.PROJECT)
        self.manager.add_hookspecs(hookspecs)
        self.sources: dict[str, str] = {}
        self.broken: list[BrokenPlugin] = []
        self.tables = {kind: Registry(kind) for kind in KINDS.values()}
        self.envs = self.tables["env"]
        for name in BUILT_IN:
            self.add(importlib.import_module(name), name, "relax-gym")
        for entry in sorted(entry_points(group=hookspecs.PROJECT), key=lambda e: e.name):
            source = f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value
            try:
                plugin = entry.load()
            except (Exception, SystemExit) as error:
                self.report(entry.name, source, "", error)
            else:
                self.add(plugin, entry.name, source)

    def add(self, plugin: object, name: str, source: str) -> None:
        """Register one plugin object and collect what its hooks return. What cannot be used of it goes to `broken`.

        Raises:
            PluginError: a misspelt hook, or a name another plugin has registered.
        """
        _check_spelling(plugin, source)
        try:
            self.manager.register(plugin, name)
            self.manager.check_pending()
        except Exception as error:  # a hook with arguments it cannot have, or a second plugin of this name
            if self.manager.get_plugin(name) is plugin:
                self.manager.unregister(plugin)
            return self.report(name, source, "", error)
        self.sources[name] = source
        for kind, key, value in self._registrations(plugin, name, source):
            self.tables[kind].add(key, value, source)
            if isinstance(value, EnvSpec):
                add_to_gymnasium(value)
        return None

    def _registrations(self, plugin: object, name: str, source: str) -> Iterator[tuple[str, str, Any]]:
        """(kind, name, value) of all that a plugin registers and that is what its hook promises."""

        def attempt(part: str, call: Callable[[], T]) -> T | None:
            try:
                return call()
            except (Exception, SystemExit) as error:
                if source == "relax-gym":
                    raise
                self.report(name, source, part, error)
                return None

        for hook, kind in KINDS.items():
            for impl in getattr(self.manager.hook, hook).get_hookimpls():
                if impl.plugin is plugin:
                    values = attempt(f"{hook}()", partial(_ask, impl)) or {}
                    for key, given in values.items():
                        value = attempt(f"{kind} {key!r}", partial(registered, kind, key, given))
                        if value is not None:
                            yield kind, key, value

    def report(self, name: str, source: str, part: str, error: BaseException) -> None:
        """Note that a plugin, or a part of it, is left out. Called while the error is handled."""
        self.broken.append(
            BrokenPlugin(name=name, source=source, part=part, error=reason(error), traceback=traceback.format_exc())
        )

    def get(self, kind: str, name: str) -> Any:
        """What a plugin registered under a name; `kind` is one of the values of KINDS."""
        return self.tables[kind].get(name)

    @property
    def hook(self) -> Any:
        """Pluggy's hook callers, for the observers."""
        return self.manager.hook


def _ask(implementation: pluggy.HookImpl) -> dict[Any, Any]:
    values: Any = implementation.function()
    return dict(values)


def _check_spelling(plugin: object, source: str) -> None:
    known = [name for name in vars(hookspecs) if name.startswith(("register_", "on_"))]
    for attribute in dir(plugin):
        value = getattr(plugin, attribute, None)
        if getattr(value, f"{hookspecs.PROJECT}_impl", None) and attribute not in known:
            raise PluginError(f"{source} implements an unknown hook {attribute!r}{suggestion(attribute, known)}")


@functools.cache
def plugins() -> Plugins:
    """The process's plugins, loaded once."""
    return Plugins()
