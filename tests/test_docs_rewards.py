"""docs/rewards.md names every built-in reward as it is."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from relax_gym.cli.rewards import markdown_table
from relax_gym.plugins import plugins
from relax_gym.registry import check_kwargs
from relax_gym_rewards._instructions import CHECKS
from relax_gym_rewards.catalog import FACTS

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/rewards.md").read_text(encoding="utf-8")
TABLE = plugins().tables["reward"]
BUILT_IN = [name for name in TABLE.names() if TABLE.source(name) == "relax-gym"]


def test_the_table_is_what_the_registry_says() -> None:
    expected = "\n".join(markdown_table(TABLE))
    found = PAGE.partition("<!-- table -->\n")[2].partition("\n<!-- end of table -->")[0]
    assert found == expected, "put the output of `relax-gym rewards list --markdown` there"


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_reward_has_a_range_and_an_example_that_its_options_allow(name: str) -> None:
    assert name in FACTS, f"say the range and an example of {name!r} in rewards/relax_gym_rewards/catalog.py"
    kwargs: dict[str, Any] = tomllib.loads(f"kwargs = {{ {FACTS[name].example} }}")["kwargs"]
    check_kwargs("reward", name, TABLE.get(name), kwargs)
    assert FACTS[name].range


def test_no_facts_without_a_reward_and_no_heading_is_linked_in_vain() -> None:
    assert sorted(FACTS) == BUILT_IN
    for page, anchor in re.findall(r"\]\(([\w.]+\.md)?#([\w-]+)\)", PAGE):
        text = (ROOT / "docs" / page).read_text(encoding="utf-8") if page else PAGE
        headings = {
            re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-")
            for line in text.splitlines()
            if line.startswith("#")
        }
        assert anchor in headings


def test_every_kind_of_instruction_is_there() -> None:
    section = PAGE.partition("## Instructions")[2].partition("\n## ")[0]
    missing = [kind for kind, check in CHECKS.items() for word in (kind, *check.needs) if f"`{word}`" not in section]
    assert not missing
