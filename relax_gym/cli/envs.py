"""`envs list | show | check | play`."""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relax_gym.cli.output import documentation, new_app, parse_kwargs, print_table
from relax_gym.errors import ConfigError, PluginError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from relax_gym.cli.playing import Policy, Spectator
    from relax_gym.types import Message

SHOWN_TURNS = 12

app = new_app("Environments.")
EnvId = Annotated[str, typer.Argument(metavar="ID", help="namespace/Name-v0, or a class in a file: my_env.py:MyEnv.")]
Kwargs = Annotated[
    list[str] | None, typer.Option("--kwargs", metavar="KEY=VALUE", help="A constructor argument, e.g. level=3.")
]


@app.command("list")
def list_() -> None:
    """Every environment, what it is, and who brings it."""
    from relax_gym.plugins import plugins

    table = plugins().envs
    print_table(
        ("id", "what it is", "from"),
        [(name, _summary(table.get(name).load), table.source(name)) for name in table.names()],
    )


@app.command()
def show(id: EnvId, kwargs: Kwargs = None) -> None:
    """Documentation, arguments, tools, a first observation and an episode of the expert."""
    from relax_gym.cli import playing
    from relax_gym.registry import spec
    from relax_gym.types import Task

    id, arguments = find_env(id), parse_kwargs(kwargs or ())
    factory = spec(id).load()
    print(f"{id}\n\n{documentation(factory) or 'No documentation.'}\n")
    parameters = inspect.signature(factory).parameters.values()
    print_table(("argument", "type", "default"), [_argument(parameter, spec(id).kwargs) for parameter in parameters])
    try:
        offer = playing.look(Task(env_id=id, seed=0, kwargs=arguments))
    except ConfigError as error:
        print(f"\nNo example episode: {error}; give arguments with --kwargs key=value")
        return
    for tool in offer.tools:
        print(f"\ntool: {json.dumps(tool['function'], ensure_ascii=False)}")
    print("\nan episode of the expert, seed 0:" if offer.expert else "\na first observation, seed 0:")
    _play(id, arguments, 0, playing.expert if offer.expert else playing.nobody, max_turns=SHOWN_TURNS)


@app.command()
def check(id: EnvId, kwargs: Kwargs = None) -> None:
    """Check that an environment keeps its contract; exit code 1 when it does not."""
    from relax_gym.testing import check_env

    results = check_env(find_env(id), **parse_kwargs(kwargs or ()))
    print_table(("check", "", "detail"), [(r.name, "ok" if r.passed else "FAILED", r.detail) for r in results])
    if not all(result.passed for result in results):
        raise typer.Exit(1)


@app.command()
def play(
    id: EnvId,
    kwargs: Kwargs = None,
    seed: Annotated[int, typer.Option(min=0, help="Which episode.")] = 0,
    expert: Annotated[bool, typer.Option("--expert", help="Let the env's expert play.")] = False,
) -> None:
    """Play an episode yourself: one line of text is one action."""
    from relax_gym.cli import playing

    total = _play(find_env(id), parse_kwargs(kwargs or ()), seed, playing.expert if expert else _typed)
    print(f"total reward {total:g}")


def find_env(id: str) -> str:
    """The id itself; a class in a file or module (`my_env.py:MyEnv`, `package.module:MyEnv`) is registered first.

    Raises:
        PluginError: the file cannot be imported or has no such class.
    """
    module, colon, name = id.rpartition(":")
    if not colon:
        return id
    from relax_gym import registry

    if module.endswith(".py"):
        module = _import_file(Path(module))
    env = registry.load(f"{module}:{name}")
    registry.register(f"local/{name}-v0", env)
    return f"local/{name}-v0"


def _import_file(path: Path) -> str:
    name = f"_relax_gym_file_{path.stem}"  # under its own name a json.py would take the place of the library's
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "the name ends with .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise PluginError(f"cannot import {path}: {type(error).__name__}: {error}") from error
    return name


async def _typed(driver: object) -> str | None:
    import asyncio

    from relax_gym.workers import Worker

    if sys.stdin.isatty():
        print("> ", end="", flush=True)
    reader = Worker("stdin")  # a thread of its own, so that Ctrl-C does not wait for a line
    typing = asyncio.ensure_future(reader.call(sys.stdin.readline))
    try:
        while not typing.done():  # a Ctrl-C that another thread got is seen when the loop next wakes
            await asyncio.wait({typing}, timeout=0.2)
    finally:
        typing.cancel()
        reader.stop()
    return line.removesuffix("\n") if (line := typing.result()) else None


def _play(id: str, kwargs: Mapping[str, Any], seed: int, policy: Policy, max_turns: int = 1000) -> float:
    from relax_gym.cli import playing
    from relax_gym.registry import check_kwargs, spec
    from relax_gym.tasks import load_rows
    from relax_gym.types import Task

    found = spec(id)
    check_kwargs("env", id, found.load(), {**found.kwargs, **kwargs})
    rows = load_rows("--kwargs", id, kwargs)
    task = Task(env_id=id, seed=seed, kwargs=kwargs, options=None if rows is None else rows[0])
    return playing.play(task, policy, _printer(), max_turns=max_turns)


def _printer() -> Spectator:
    from relax_gym.cli.playing import Spectator
    from relax_gym.env import StepResult
    from relax_gym.view import message_text, printable

    def on_observation(messages: list[Message]) -> None:
        for message in messages:
            print(message_text(message))

    def on_result(result: StepResult) -> None:
        end = "  terminated" if result.terminated else "  truncated" if result.truncated else ""
        print(f"  reward {float(result.reward):g}{end}")

    return Spectator(
        on_observation=on_observation,
        on_action=lambda action: print(printable(f"agent: {action}")),
        on_result=on_result,
    )


def _summary(load: Callable[[], object]) -> str:
    try:
        return documentation(load()).partition("\n")[0]
    except PluginError as error:
        return f"cannot be loaded: {error}"


def _argument(parameter: inspect.Parameter, defaults: Mapping[str, Any]) -> tuple[str, str, str]:
    kind = "" if parameter.annotation is parameter.empty else parameter.annotation
    if not isinstance(kind, str):
        kind = inspect.formatannotation(kind)
    default = defaults.get(parameter.name, parameter.default)
    return parameter.name, kind, "required" if default is parameter.empty else repr(default)
