"""Rows of a data set, loaded once, checked before anything else, never changed."""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from relax_gym.env import check_messages
from relax_gym.errors import ConfigError, EnvError, suggestion

Row = dict[str, Any]


class RowOptions(Sequence[Mapping[str, Any]]):
    """`reset` options for each row. Every look gives a fresh copy, so nobody can change the rows."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return {"row": copy.deepcopy(self._rows[index])}


def check_row(row: Any, place: str, prompt_field: str, answer_field: str) -> None:
    """Raise ConfigError naming `place` unless the row has its fields and the prompt is text or chat messages."""
    if not isinstance(row, Mapping):
        raise ConfigError(f"{place} is {row!r:.100}; a row must be an object with fields")
    for field in filter(None, (prompt_field, answer_field)):
        if row.get(field) is None:
            fault = "is null" if field in row else "is missing"
            raise ConfigError(f"{place}: field {field!r} {fault}{suggestion(field, map(str, row))}")
    prompt = row[prompt_field]
    if not isinstance(prompt, str):
        try:
            check_messages(prompt)
        except EnvError as error:
            raise ConfigError(f"{place}: field {prompt_field!r} is neither a string nor messages: {error}") from error


def with_media(prompt: str, row: Row, fields: Mapping[str, str], folder: Path | None) -> str | list[dict[str, Any]]:
    """A prompt as content parts: what the row's fields of each kind hold, where `<image>`, `<video>` or `<audio>` stand
    in the prompt, or all of it in front when there are no such markers. Relative paths are looked up in `folder`.

    Raises:
        EnvError: the prompt has other markers than the row has items.
    """
    items = {kind: [_located(item, folder) for item in _items(row, field)] for kind, field in fields.items()}
    parts = [{"type": kind, kind: item} for kind, found in items.items() for item in found]
    pieces = re.split(f"<({'|'.join(fields)})>", prompt)
    if not parts or len(pieces) == 1:
        return [*parts, {"type": "text", "text": prompt}] if parts else prompt
    if sorted(pieces[1::2]) != sorted(part["type"] for part in parts):
        raise EnvError(f"the prompt marks {', '.join(pieces[1::2])}, but the row has {', '.join(map(_kind, parts))}")
    waiting = {kind: iter(found) for kind, found in items.items()}
    placed = [
        {"type": piece, piece: next(waiting[piece])} if at % 2 else {"type": "text", "text": piece}
        for at, piece in enumerate(pieces)
    ]
    return [part for part in placed if part.get("text") != ""]


def _kind(part: Mapping[str, Any]) -> str:
    return str(part["type"])


def _items(row: Row, field: str) -> list[Any]:
    value = row.get(field)
    return [] if value is None else value if isinstance(value, list) else [value]


def _located(item: Any, folder: Path | None) -> Any:
    relative = isinstance(item, str) and folder is not None and ":" not in item and not Path(item).is_absolute()
    return str(folder / item) if relative and folder is not None else item


def load_rows(
    path: str | None, rows: Sequence[Row] | None, dataset: str | None, split: str, prompt_field: str, answer_field: str
) -> Sequence[Row]:
    """Rows from the one source that is given. Raises ConfigError naming the source and the row that is wrong."""
    given = [name for name, value in (("path", path), ("rows", rows), ("dataset", dataset)) if value is not None]
    if len(given) != 1:
        raise ConfigError(f"got {' and '.join(given) or 'no rows'}; give exactly one of path, rows and dataset")
    if path is not None:
        return load_file(path, prompt_field, answer_field)
    if dataset is not None:
        return load_hub(dataset, split, prompt_field, answer_field)
    return check_rows(rows or [], "rows", prompt_field, answer_field)


def check_rows(rows: Sequence[Row], source: str, prompt_field: str, answer_field: str) -> Sequence[Row]:
    """Every row checked, numbered from 1. Raises ConfigError, also when there is none."""
    if not rows:
        raise ConfigError(f"{source} has no rows; at least one is needed")
    for number, row in enumerate(rows, start=1):
        check_row(row, f"{source}, row {number}", prompt_field, answer_field)
    return rows


def load_file(path: str, prompt_field: str, answer_field: str) -> Sequence[Row]:
    """Rows of a JSON-lines or Parquet file; read and checked again only when the file has changed.

    Raises:
        ConfigError: cannot be read, or a row is wrong; names file and row.
    """
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise ConfigError(f"data set file {path!r} does not exist; give a .jsonl or .parquet file")
    return _load_file(file, file.stat().st_mtime_ns, prompt_field, answer_field)


@functools.lru_cache(maxsize=16)
def _load_file(file: Path, mtime_ns: int, prompt_field: str, answer_field: str) -> Sequence[Row]:
    if file.suffix in (".jsonl", ".ndjson"):
        rows = list(_read_json_lines(file))
    elif file.suffix in (".parquet", ".pq"):
        rows = _read_parquet(file)
    else:
        raise ConfigError(f"{file}: cannot read {file.suffix!r} files; allowed: .jsonl, .parquet")
    return check_rows(rows, str(file), prompt_field, answer_field)


def _read_json_lines(file: Path) -> Iterator[Row]:
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{file}, line {number} is not JSON: {error}; write one object a line") from error


def _read_parquet(file: Path) -> list[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(f"{file}: reading Parquet needs pyarrow; pip install 'relax-gym[envs]'") from error
    try:
        rows: list[Row] = pyarrow.parquet.read_table(file).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    return rows


@functools.lru_cache(maxsize=16)
def load_hub(name: str, split: str, prompt_field: str, answer_field: str) -> Sequence[Row]:
    """Rows of a Hugging Face data set: a folder that `save_to_disk` wrote, or whatever `load_dataset` takes.

    Columns are checked here; the values of a row when it is used. Images, audio and videos stay encoded: they are
    decoded like all media, in workers that a broken file cannot stop.
    """
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(f"data set {name!r} needs the datasets package; pip install 'relax-gym[datasets]'") from error
    folder = Path(name).expanduser()
    saved = any((folder / marker).is_file() for marker in ("state.json", "dataset_dict.json"))
    try:
        found = datasets.load_from_disk(str(folder)) if saved else datasets.load_dataset(name, split=split)
    except Exception as error:  # whatever the hub, a loading script or a file format raises
        raise ConfigError(f"cannot load data set {name!r}, split {split!r}: {error}") from error
    if isinstance(found, dict):
        if split not in found:
            raise ConfigError(f"data set {name!r} has no split {split!r}{suggestion(split, found)}")
        found = found[split]
    for column, feature in found.features.items():
        if getattr(feature, "decode", False):
            found = found.cast_column(column, type(feature)(decode=False))
    rows: Sequence[Row] = found
    if len(rows) == 0:
        raise ConfigError(f"data set {name!r}, split {split!r} has no rows; at least one is needed")
    check_row(rows[0], f"data set {name!r}, row 1", prompt_field, answer_field)
    return rows
