"""The folder of one evaluation: what is evaluated, every finished episode, the results. `relax-gym view` reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from relax_gym.config import read_toml
from relax_gym.disk import write_atomically
from relax_gym.endpoint.statistics import in_short
from relax_gym.errors import RunFolderError
from relax_gym.lines import append_line, keep_lines, read_lines
from relax_gym.media.files import MediaFolder
from relax_gym.run_folder import RESULTS_FILE

KEPT_GIB = 4.0
"""Most GiB of media that are kept, for `relax-gym view --html`."""


class EvalFolder:
    """A folder that holds no evaluation yet, or (resuming) the one with these settings.

    Resuming forgets what is to be done again: a line cut short by a kill, and episodes whose requests failed.

    Raises:
        RunFolderError: it cannot be written, or holds something else; says what differs.
    """

    def __init__(self, path: Path, settings: Mapping[str, Mapping[str, Any]], *, resume: bool) -> None:
        self.path = path
        self._config, self._episodes = path / "config.toml", path / "episodes.jsonl"
        begun = self._config.exists()
        if begun and not resume:
            raise RunFolderError(f"{str(path)!r} holds a run already; continue it with --resume, or give another --out")
        if begun:
            _check_same(read_toml(self._config), settings, path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            if begun:
                keep_lines(self._episodes, lambda record: record["fault"] != "request")
            else:
                write_atomically(self._config, tomli_w.dumps(settings).encode())
        except OSError as error:
            raise RunFolderError(f"cannot write {str(path)!r}: {error.strerror}; choose another with --out") from error
        self.records = [in_short(record) for record in read_lines(self._episodes)]
        self._media = MediaFolder(path / "media", KEPT_GIB * 2**30)

    def add(self, record: Mapping[str, Any]) -> None:
        """Append one finished episode."""
        append_line(self._episodes, record, self._media.keep)
        self.records.append(in_short(record))

    def write_results(self, results: Mapping[str, Any]) -> None:
        """Write results.json."""
        write_atomically(self.path / RESULTS_FILE, (json.dumps(results, indent=2) + "\n").encode())

    def close(self) -> None:
        """Wait for the media that are still being written. Idempotent."""
        self._media.close()


def _check_same(old: Mapping[str, Any], new: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    there, here = _flat(old), _flat(new)
    changed = [key for key in {**there, **here} if there.get(key) != here.get(key)]
    if changed:
        lines = "; ".join(
            f"{key}: {there.get(key, 'not set')} there, {here.get(key, 'not set')} here" for key in changed
        )
        raise RunFolderError(
            f"{str(path)!r} holds another evaluation ({lines}); give the same settings, or another --out"
        )


def _flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in tables.items():
        out |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return out
