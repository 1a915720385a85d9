"""`init env | reward | plugin`: a working start."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from relax_gym.cli.output import new_app

app = new_app("Write a working start of your own.")
Name = Annotated[str, typer.Argument(metavar="NAME", help="snake_case, e.g. count_down.")]
Folder = Annotated[Path, typer.Option("--dir", help="Where to write.")]


@app.command()
def env(name: Name, dir: Folder = Path()) -> None:
    """An environment in one file, with an expert."""
    from relax_gym import scaffold

    path = scaffold.init_env(name, dir)
    print(f"wrote {path}\ncheck it: relax-gym envs check {path}:{scaffold.class_name(name)}")
    print(f"play it:  relax-gym envs play {path}:{scaffold.class_name(name)}")


@app.command()
def reward(name: Name, dir: Folder = Path()) -> None:
    """A reward in one file."""
    from relax_gym import scaffold

    path = scaffold.init_reward(name, dir)
    print(f"wrote {path}\nto train with it, register it in a plugin: relax-gym init plugin my_plugin")


@app.command()
def plugin(name: Name, dir: Folder = Path()) -> None:
    """An installable distribution: environment, reward, config and tests."""
    from relax_gym import scaffold

    for path in (files := scaffold.init_plugin(name, dir)):
        print(f"wrote {path}")
    root = files[0].parent
    print(
        f"install it: pip install -e {root}\ntest it:    pytest {root}\ntrain it:   relax-gym train {root}/train.toml"
    )
