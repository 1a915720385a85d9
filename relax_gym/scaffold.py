"""Writes working starts for environments, rewards and plugins."""

from __future__ import annotations

import importlib.util
import keyword
import re
from importlib.resources import files
from pathlib import Path
from string import Template

from relax_gym.errors import ConfigError

NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


def class_name(name: str) -> str:
    """`count_down` → `CountDown`."""
    return "".join(part.capitalize() for part in name.split("_"))


def init_env(name: str, folder: Path) -> Path:
    """Write `<name>.py` with an environment class; returns its path.

    Raises:
        ConfigError: the name is no module name or is taken, the file exists, or the folder cannot be written.
    """
    _check_name(name)
    values = {"title": name, "class_name": class_name(name)}
    return _write(folder, {f"{name}.py": _fill("env.py", values)})[0]


def init_reward(name: str, folder: Path) -> Path:
    """Write `<name>.py` with a reward class; returns its path. Raises as `init_env` does."""
    _check_name(name)
    values = {"title": name, "class_name": class_name(name)}
    return _write(folder, {f"{name}.py": _fill("reward.py", values)})[0]


def init_plugin(name: str, folder: Path) -> list[Path]:
    """Write the distribution `<name-with-dashes>/`; returns its files, pyproject.toml first. Raises like `init_env`."""
    _check_name(name)
    distribution = name.replace("_", "-")
    env_class, reward_class = f"{class_name(name)}Env", f"{class_name(name)}Reward"
    values = {"name": name, "distribution": distribution, "env_class": env_class, "reward_class": reward_class}
    package = f"src/{name}"
    contents = {
        "pyproject.toml": _fill("pyproject.toml", values),
        "train.toml": _fill("train.toml", values),
        f"{package}/__init__.py": _fill("plugin.py", values),
        f"{package}/env.py": _fill("env.py", {"title": f"{name}.env", "class_name": env_class}),
        f"{package}/reward.py": _fill("reward.py", {"title": f"{name}.reward", "class_name": reward_class}),
        f"{package}/py.typed": "",
        f"tests/test_{name}.py": _fill("test_plugin.py", values),
    }
    return _write(folder / distribution, contents)


def _check_name(name: str) -> None:
    if not NAME.fullmatch(name) or keyword.iskeyword(name):
        raise ConfigError(f"name {name!r} is no module name; write it in snake_case, e.g. count_down")
    if importlib.util.find_spec(name) is not None:
        raise ConfigError(f"name {name!r} is taken by an installed module; choose another")


def _fill(template: str, values: dict[str, str]) -> str:
    text = files("relax_gym").joinpath("templates", f"{template}.tmpl").read_text(encoding="utf-8")
    return Template(text).substitute(values)


def _write(folder: Path, contents: dict[str, str]) -> list[Path]:
    paths = [folder / name for name in contents]
    taken = [str(path) for path in paths if path.exists()]
    if taken:
        raise ConfigError(f"{', '.join(taken)} exists already and is not overwritten; choose another name or --dir")
    try:
        for path, text in zip(paths, contents.values(), strict=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}; choose another --dir") from error
    return paths
