"""Names → things. One table for each kind; filled by plugins, asked by everybody else."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from relax_gym.errors import ConfigError, PluginError, UnknownNameError, suggestion

if TYPE_CHECKING:
    from relax_gym.config import Options
    from relax_gym.env import Env

BUILT_IN_ENVS = "relax_gym_envs.catalog:ENVS"
DOTTED = "python:"
ENV_ID = re.compile(r"^[\w-]+/[\w-]+-v\d+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSpec:
    """A registered environment: its id, where its class is, and default constructor arguments."""

    id: str
    entry_point: str | Callable[..., Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not ENV_ID.match(self.id):
            raise PluginError(f"env id {self.id!r} is malformed; ids look like 'namespace/Name-v0'")
        if not isinstance(self.entry_point, str) and not callable(self.entry_point):
            raise PluginError(f"env {self.id!r} is {self.entry_point!r:.100}; it must be a class or 'module:Class'")

    def load(self) -> Callable[..., Any]:
        """The env class (or factory), imported."""
        factory: Callable[..., Any] = load(self.entry_point)
        return factory


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """A replaceable part of a run: what builds it, and the class of its options.

    Give both as strings and keep the options in a module that imports nothing heavy: they are checked when a config is
    read.
    """

    factory: str | Callable[..., Any]
    options: str | type[Options]
    serve: str | Callable[[], None] | None = None
    """Of a learner that spreads over processes: what those run that a launcher has started beside the trainer's. It
    returns when the trainer has ended."""

    def load_options(self) -> type[Options]:
        """The class of the options, imported."""
        from relax_gym.config import Options

        model: type[Options] = load(self.options)
        if not (isinstance(model, type) and issubclass(model, Options)):
            raise PluginError(f"options {self.options!r} is no subclass of relax_gym.config.Options")
        return model


class Registry:
    """One kind's table."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._values: dict[str, Any] = {}
        self._sources: dict[str, str] = {}

    def add(self, name: str, value: Any, source: str) -> None:
        """Claim a name. Raises PluginError naming both claimants when it is taken."""
        if name in self._values:
            raise PluginError(
                f"{self.kind} {name!r} is registered twice: by {self._sources[name]} and by {source}; rename one"
            )
        self._values[name], self._sources[name] = value, source

    def get(self, name: str) -> Any:
        """The value under a name, imported if it was given as a string. A reward may be `python:module:attribute`.

        Raises:
            UnknownNameError: nobody registered it; the message suggests the nearest name.
            PluginError: it cannot be imported or is not what it should be; names who registered it.
        """
        if self.kind == "reward" and name.startswith(DOTTED):
            value = load(name.removeprefix(DOTTED))
            _check_kind(self.kind, value)
            return value
        if name not in self._values:
            raise UnknownNameError(self.kind, name, self._values)
        try:
            value = load(self._values[name])
            _check_kind(self.kind, value)
        except PluginError as error:
            raise PluginError(f"{self.kind} {name!r} of {self._sources[name]}: {error}") from error
        return value

    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._values)

    def source(self, name: str) -> str:
        """Which distribution registered the name."""
        return self._sources[name]


def registered(kind: str, name: str, value: Any) -> Any:
    """What goes into the table for a value that a hook returned. Raises PluginError when it is of the wrong type."""
    if not isinstance(name, str):
        raise PluginError(f"the name {name!r} must be text")
    if kind == "env":
        spec = value if isinstance(value, EnvSpec) else EnvSpec(id=name, entry_point=value)
        if spec.id != name:
            raise PluginError(f"the EnvSpec under {name!r} has id {spec.id!r}; they must be equal")
        return spec
    if not isinstance(value, str):
        _check_kind(kind, value)
    return value


def _check_kind(kind: str, value: Any) -> None:
    if kind == "env":
        return
    if kind == "algorithm":
        from relax_gym.algorithm import Algorithm

        fits, expected = isinstance(value, type) and issubclass(value, Algorithm), "a subclass of relax_gym.Algorithm"
    elif kind == "reward":
        fits, expected = callable(value), "a class or function that returns a reward"
    else:
        fits, expected = isinstance(value, Component), "a relax_gym.Component"
    if not fits:
        raise PluginError(f"it is {value!r:.100}; it must be {expected}")


def load(target: Any) -> Any:
    """Import `"module:attribute"`; anything that is not a string is returned as it is."""
    if not isinstance(target, str):
        return target
    module, _, attribute = target.partition(":")
    try:
        value: Any = importlib.import_module(module)
        for part in attribute.split("."):
            value = getattr(value, part)
    except Exception as error:
        raise PluginError(f"cannot load {target!r}: {type(error).__name__}: {error}") from error
    return value


def check_kwargs(kind: str, name: str, factory: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse keyword arguments the factory does not take, before it is called."""
    signature = inspect.signature(factory)
    accepts_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    known = [p.name for p in signature.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for key in kwargs:
        if key not in known and not accepts_any:
            raise ConfigError(f"{kind} {name!r} takes no argument {key!r}{suggestion(key, known)}")
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        raise ConfigError(f"{kind} {name!r}: {error}; it takes {', '.join(known) or 'no arguments'}") from error


def _envs() -> Registry:
    from relax_gym.plugins import plugins

    return plugins().envs


def register(id: str, entry_point: str | Callable[..., Any], **kwargs: Any) -> None:
    """Register an environment from code: `register("me/Echo-v0", EchoEnv)`. Plugins use the `register_envs` hook."""
    spec = EnvSpec(id=id, entry_point=entry_point, kwargs=kwargs)
    _envs().add(id, spec, "relax_gym.register")
    add_to_gymnasium(spec)


def spec(id: str) -> EnvSpec:
    """The EnvSpec of an id. Raises UnknownNameError suggesting the nearest id."""
    found: EnvSpec = _envs().get(id)
    return found


def list_envs() -> list[str]:
    """All environment ids, sorted."""
    return _envs().names()


def make(id: str, **kwargs: Any) -> Env:
    """Build an environment, not wrapped in anything. `kwargs` go to its constructor.

    Raises:
        UnknownNameError: no such id.
        ConfigError: an argument the environment does not take.
    """
    import gymnasium

    found = spec(id)
    factory = found.load()
    arguments = {**found.kwargs, **kwargs}
    check_kwargs("env", id, factory, arguments)
    env: Env = factory(**arguments)
    if env.unwrapped.spec is None:
        env.unwrapped.spec = gymnasium.envs.registration.EnvSpec(id, entry_point=found.entry_point, kwargs=arguments)
    return env


def add_to_gymnasium(spec: EnvSpec) -> None:
    """Make `gymnasium.make(spec.id)` work."""
    import gymnasium

    if spec.id not in gymnasium.registry:
        gymnasium.register(id=spec.id, entry_point=spec.entry_point, kwargs=dict(spec.kwargs))


def add_built_in_to_gymnasium() -> None:
    """Make the built-in ids known to `gymnasium.make`. Those of other plugins follow when plugins are loaded."""
    for id, entry_point in load(BUILT_IN_ENVS).items():
        add_to_gymnasium(EnvSpec(id=id, entry_point=entry_point))
