"""Finds the fenced code blocks of README.md by name. Run as a script it prints one, for continuous integration."""

from __future__ import annotations

import re
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"
BLOCK = re.compile(r"^<!-- block: (?P<name>[\w-]+) -->\n```(?P<language>\w+)\n(?P<code>.*?)^```$", re.M | re.S)


def blocks(text: str | None = None) -> dict[str, tuple[str, str]]:
    """Name → (language, code) of every named block, in order."""
    text = README.read_text(encoding="utf-8") if text is None else text
    return {match["name"]: (match["language"], match["code"]) for match in BLOCK.finditer(text)}


if __name__ == "__main__":
    print(blocks()[sys.argv[1]][1])
