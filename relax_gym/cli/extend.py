"""`plugins list | show | doctor`: what is installed."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from typing import Annotated

import typer

from relax_gym.cli import envs, rewards
from relax_gym.cli.output import documentation, new_app, print_table
from relax_gym.errors import PluginError, UnknownNameError

plugins_app = new_app("Plugins.")
OWN_COMMANDS: dict[str, Callable[[str], None]] = {"env": envs.show, "reward": rewards.show}
CORE_PACKAGES = ("relax-gym", "gymnasium", "torch", "transformers", "pluggy", "pydantic")
DISTRIBUTION = "relax-gym"
REQUIREMENT_NAME = re.compile(r"[\w.-]+")
EXTRA = re.compile(r"""extra\s*==\s*['"]([\w-]+)['"]""")


@plugins_app.command("list")
def list_plugins() -> None:
    """Every plugin, its distribution, and what it registered."""
    from relax_gym.plugins import plugins

    loaded = plugins()
    rows = []
    for name, source in loaded.sources.items():
        hooks = [hook.name for hook in loaded.manager.get_hookcallers(loaded.manager.get_plugin(name)) or ()]
        rows.append((name, source, ", ".join(hooks)))
    print_table(("plugin", "from", "hooks"), rows)
    print()
    print_table(
        ("kind", "name", "from"),
        [(kind, name, table.source(name)) for kind, table in loaded.tables.items() for name in table.names()],
    )


@plugins_app.command()
def show(
    kind: Annotated[str, typer.Argument(help="One of the kinds that `plugins list` has, as learner.")],
    name: Annotated[str, typer.Argument(help="A name of this kind, as megatron.")],
) -> None:
    """Options of one of them: type, default, what it is.

    For envs and rewards it prints what `envs show` and `rewards show` do.
    """
    from relax_gym.cli.options import option_rows
    from relax_gym.plugins import plugins

    tables = plugins().tables
    if kind not in tables:
        raise UnknownNameError("kind", kind, tables)
    if kind in OWN_COMMANDS:
        OWN_COMMANDS[kind](name)
        return
    found = tables[kind].get(name)
    model = found if kind == "algorithm" else found.load_options()
    print(f"{kind} {name}, from {tables[kind].source(name)}\n\n{documentation(model) or 'No documentation.'}\n")
    rows = list(option_rows(model))
    if rows:
        print_table(("option", "type", "default", "what it is"), rows)
    else:
        print("It has no options.")


@plugins_app.command()
def doctor() -> None:
    """Say what is broken, and which optional parts are installed; exit code 1 when something is broken."""
    from relax_gym.plugins import plugins

    print_table(("package", "version"), [(name, _installed(name) or "missing") for name in CORE_PACKAGES])
    print()
    print_table(("optional", "", "to install"), extras())
    print()
    try:
        broken = plugins().broken
    except PluginError as error:
        print(f"broken: {error}")
        raise typer.Exit(1) from None
    for plugin in broken:
        print(f"broken: {plugin.what}\n{plugin.traceback}")
    if broken:
        raise typer.Exit(1)
    print(f"{len(plugins().sources)} plugins, none broken")


def extras() -> list[tuple[str, str, str]]:
    """(extra, what is there or missing, pip line) for each optional part of the distribution."""
    rows = []
    for extra in metadata(DISTRIBUTION).get_all("Provides-Extra") or ():
        names = [
            m.group()
            for line in requires(DISTRIBUTION) or ()
            if extra in EXTRA.findall(line) and (m := REQUIREMENT_NAME.match(line))
        ]
        missing = [name for name in names if _installed(name) is None]
        state = f"missing: {', '.join(missing)}" if missing else "installed"
        rows.append((extra, state, f"pip install '{DISTRIBUTION}[{extra}]'" if missing else ""))
    return rows


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
