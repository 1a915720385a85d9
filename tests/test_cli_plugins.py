"""`plugins show`: the options of whatever plugins have registered."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
from command import run
from pydantic import Field

from relax_gym.cli.options import option_rows
from relax_gym.config import Options, TeacherSection
from relax_gym.plugins import plugins
from relax_gym.registry import Component
from relax_gym.section import Section
from relax_gym_trainers.torch_learner.options import LoraOptions

KINDS = ("algorithm", "learner", "sampler", "teacher", "tracker")
BUILT_IN = [(kind, name) for kind in KINDS for name in plugins().tables[kind].names()]


class Inner(Section):
    size: int = Field(description="of it")
    names: tuple[str, ...] = ("a", "b")


class Base(Options):
    mode: Literal["fast", "exact"] = Field("exact", description="how")


class Shown(Base):
    """What it is."""

    mode: Literal["fast", "exact"] = "fast"
    limit: int | None = None
    table: dict[str, Any] = Field(default_factory=dict)
    inner: Inner | None = None
    engine: TeacherSection | None = None


def test_rows_say_type_default_and_what_it_is() -> None:
    assert list(option_rows(Shown)) == [
        ("mode", '"fast" | "exact"', '"fast"', "how"),
        ("limit", "int | None", "None", ""),
        ("table", "dict[str, Any]", "{}", ""),
        ("inner", "section | None", "None", ""),
        ("inner.size", "int", "required", "of it"),
        ("inner.names", "tuple[str, ...]", '["a", "b"]', ""),
        ("engine", "section | None", "None", ""),
    ]


@pytest.mark.parametrize(("kind", "name"), BUILT_IN)
def test_every_option_of_the_built_in_plugins_is_shown_and_described(capsys: Any, kind: str, name: str) -> None:
    code, out, _ = run(capsys, "plugins", "show", kind, name)
    found = plugins().get(kind, name)
    model = found.load_options() if isinstance(found, Component) else found
    rows = list(option_rows(model))
    assert code == 0
    assert out.startswith(f"{kind} {name}, from relax-gym\n")
    assert [row[0] for row in rows if f"\n{row[0]} " not in out] == []
    assert [row[0] for row in rows if not row[3]] == []


def test_plugins_of_others_are_shown_too(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    table = plugins().tables["tracker"]
    monkeypatch.setitem(table._values, "shown", Component(factory="math:sqrt", options=Shown))
    monkeypatch.setitem(table._sources, "shown", "shown-dist 1.0")
    out = run(capsys, "plugins", "show", "tracker", "shown")[1]
    assert out.startswith("tracker shown, from shown-dist 1.0\n\nWhat it is.\n\noption ")


def test_envs_and_rewards_are_shown_as_their_own_commands_do(capsys: Any) -> None:
    assert run(capsys, "plugins", "show", "reward", "length") == run(capsys, "rewards", "show", "length")
    game = "relax_gym/GuessNumber-v0"
    assert run(capsys, "plugins", "show", "env", game) == run(capsys, "envs", "show", game)


def test_unknown_kinds_and_names_are_one_message(capsys: Any) -> None:
    assert run(capsys, "plugins", "show", "lerner", "torch")[2].startswith(
        "error: unknown kind 'lerner'; did you mean 'l"
    )
    assert run(capsys, "plugins", "show", "learner", "troch")[2].startswith(
        "error: unknown learner 'troch'; did you me"
    )


def test_the_documentation_has_the_options_of_adapters() -> None:
    text = (Path(__file__).parents[1] / "docs" / "megatron.md").read_text(encoding="utf-8")
    for name, _, default, _ in option_rows(LoraOptions):
        assert f"| `{name}` | {default} |".replace('"all-linear"', '`"all-linear"`') in text
