"""Third-party distributions for tests: a module, and the metadata by which an installed plugin is found."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def add_distribution(folder: Path, module: str, source: str | None = None) -> None:
    """Make `folder` look as if `<module>-dist 1.0`, which has the plugin `<module>`, was installed into it."""
    info = folder / f"{module}_dist-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}-dist\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[relax_gym]\n{module} = {module}\n")
    if source is not None:
        (folder / f"{module}.py").write_text(source)


def run_with(
    paths: Sequence[Path], *command: object, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `python -m …` where the distributions in `paths` are installed."""
    inherited = os.environ.get("PYTHONPATH")
    search = os.pathsep.join([*map(str, paths), *([inherited] if inherited else [])])
    return subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        env={**os.environ, "PYTHONPATH": search, **environment},
        cwd=cwd,
        capture_output=True,
        text=True,
    )
