"""The `relax-gym` command line. A command imports what it needs when it runs, so that `--help` is quick."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from relax_gym.cli import envs as envs
from relax_gym.cli import extend as extend
from relax_gym.cli import rewards as rewards
from relax_gym.cli import runs as runs
from relax_gym.cli import scaffolds as scaffolds
from relax_gym.cli.output import new_app
from relax_gym.errors import PluginError, RelaxGymError, first_cause
from relax_gym.plugins import Plugins, plugins

TRACEBACK_VARIABLE = "RELAX_GYM_TRACEBACK"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; always ends in SystemExit.

    0: done. 1: one readable message on stderr; `RELAX_GYM_TRACEBACK=1` adds the traceback. 2: wrong usage.
    3: the event loop of a run was blocked for too long. 130, 143: stopped by SIGINT or SIGTERM, what it had is saved.
    A bug of relax-gym or of a plugin keeps Python's own traceback.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        app = build_app(tolerant=given[:2] == ["plugins", "doctor"] or given[:1] == ["doctor"])
        app(given, prog_name="relax-gym")
    except (RelaxGymError, ExceptionGroup) as error:
        cause = first_cause(error)
        if not isinstance(cause, RelaxGymError):
            raise
        if os.environ.get(TRACEBACK_VARIABLE) == "1":
            traceback.print_exception(error)
        print(f"error: {cause}", file=sys.stderr)
        sys.exit(1)


def build_app(*, tolerant: bool = False) -> typer.Typer:
    """All commands, those of plugins included. `tolerant` goes on without plugins when the tables cannot be built.

    Raises:
        PluginError: two plugins claim a name, or one misspells a hook.
    """
    app = new_app("Agentic reinforcement learning of language models, environment first.")
    app.callback()(_options)
    for command in (runs.train, runs.evaluate, runs.view, rewards.replay, runs.export, runs.doctor):
        app.command("eval" if command is runs.evaluate else None)(command)
    app.add_typer(envs.app, name="envs")
    app.add_typer(rewards.app, name="rewards")
    app.add_typer(extend.plugins_app, name="plugins")
    app.add_typer(scaffolds.app, name="init")
    try:
        _add_plugin_commands(app, plugins())
    except PluginError:
        if not tolerant:
            raise
    return app


def _add_plugin_commands(app: typer.Typer, loaded: Plugins) -> None:
    for implementation in loaded.hook.register_commands.get_hookimpls():
        try:
            implementation.function(*(app for _ in implementation.argnames))
        except Exception as error:
            name = implementation.plugin_name
            loaded.report(name, loaded.sources[name], "register_commands()", error)
    for broken in loaded.broken:
        print(f"warning: {broken.what} is left out: {broken.error} (see relax-gym plugins doctor)", file=sys.stderr)


def _version(wanted: bool) -> None:
    if wanted:
        from relax_gym import __version__

        print(f"relax-gym {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass
