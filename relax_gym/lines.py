"""Files of JSON records, one a line: appended to, read, and cut where a run goes on."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from relax_gym.disk import replacing, write_atomically
from relax_gym.errors import RunFolderError
from relax_gym.media.items import Media

DEEPEST, LONGEST_INT = 50, 1024  # levels, bits
BLOCK = 2**20  # bytes that are read at once from the end of a file
Line = Callable[[dict[str, Any]], bool]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a .jsonl file. A last line cut short by a kill is left out.

    Raises:
        RunFolderError: another line is broken; names it.
    """
    return [record for _, record in lines_of(path)]


def lines_of(path: Path, last: int | None = None) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Each line of a .jsonl file, and the record that it is, read as they are asked for; otherwise as `read_lines`.

    With `last` these are the lines that begin in the last so many bytes.
    """
    if not path.exists():
        return
    broken: tuple[str, ValueError] | None = None
    with path.open("rb") as file:
        after = _skip_to(file, last) if last is not None else ""
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            if broken is not None:  # and not the last one
                raise _not_json(path, *broken)
            try:
                record = json.loads(line)
            except ValueError as error:
                broken = f"line {number}{after}", error
            else:
                yield line.removesuffix(b"\n") + b"\n", record


def _skip_to(file: BinaryIO, last: int) -> str:
    """Go to the first line that begins in the last so many bytes; return what numbers of lines are counted from."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - last - 1))
    if size - last > 0:
        file.readline()
    return f" after byte {file.tell()}" if file.tell() else ""


def _not_json(path: Path, where: str, error: ValueError) -> RunFolderError:
    return RunFolderError(f"{path}, {where} is not JSON: {error}; repair or delete that line")


def append_line(path: Path, record: Mapping[str, Any], keep: Callable[[Media], Any] = repr) -> None:
    """Append a record to a .jsonl file; of media, what `keep` says."""
    line = json_text(record, keep) + "\n"
    left = memoryview(line.encode("utf-8", "backslashreplace"))  # UTF-8 has no lone surrogate; JSON has: \udc80
    with path.open("ab", buffering=0) as file:
        start = file.tell()
        try:
            while left:
                left = left[file.write(left) :]
        except OSError:
            file.truncate(start)  # another line may follow, when there is room again
            raise


def json_text(record: Mapping[str, Any], keep: Callable[[Media], Any] = repr) -> str:
    """A record as one line of JSON; of media, what `keep` says."""
    return json.dumps(_plain(record, keep), ensure_ascii=False)


def _plain(value: Any, keep: Callable[[Media], Any], depth: int = 0) -> Any:
    """What JSON can say; of media, what `keep` says. The rest (an array, an object of the env) is named, not dumped."""
    if isinstance(value, Mapping) and depth < DEEPEST:
        return {str(key): _plain(item, keep, depth + 1) for key, item in list(value.items())}  # an env may change it
    if isinstance(value, (list, tuple)) and depth < DEEPEST:
        value = tuple(value)
        if _all_numbers(value):
            return value
        return [_plain(item, keep, depth + 1) for item in value]
    if isinstance(value, Media):
        return keep(value)
    if hasattr(value, "item") and getattr(value, "size", None) == 1:
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str) or (isinstance(value, int) and value.bit_length() <= LONGEST_INT):
        return value
    return f"<{type(value).__name__}>"


def _all_numbers(values: list[Any] | tuple[Any, ...]) -> bool:
    """Whether JSON can say them as they are. Quick: a group has hundreds of thousands."""
    kinds = set(map(type, values))
    if kinds == {int}:
        return max(map(int.bit_length, values)) <= LONGEST_INT
    return kinds == {float} and all(map(math.isfinite, values))


def keep_lines(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> None:
    """Forget the records that are not wanted, and a last line that was cut short."""
    if path.exists():
        with replacing(path) as file:
            file.writelines(line for line, record in lines_of(path) if wanted(record))


def cut_lines(path: Path, *, wanted: Line, settled: Line) -> None:
    """Forget the records that are not wanted, and a last line that was cut short.

    Looks at no line before the last that is `settled`, and moves none, however many there are. What had moved when the
    process was killed is moved again by the next call.

    Raises:
        RunFolderError: a line that is looked at, and not the last, is broken; names it.
    """
    if not path.exists():
        return
    aside = path.with_suffix(".tail")
    with path.open("r+b") as file:
        if aside.exists():
            _replace_end(file, aside)
        kept: list[bytes] = []
        end, last = file.seek(0, os.SEEK_END), True
        for start, line in _lines_from_end(file):
            record = _record(path, start, line, last=last)
            if record is not None and settled(record):
                kept += [] if line.endswith(b"\n") else [b"\n"]  # whole, but for its end
                break
            last = last and not line.strip()
            end = start
            if record is not None and wanted(record):
                kept.append(line.removesuffix(b"\n") + b"\n")
        write_atomically(aside, b"%d\n%b" % (end, b"".join(reversed(kept))))
        _replace_end(file, aside)


def _replace_end(file: BinaryIO, aside: Path) -> None:
    """A file goes on from where the other says, with what it says."""
    end, _, text = aside.read_bytes().partition(b"\n")
    file.seek(int(end))
    file.write(text)
    file.truncate()
    file.flush()
    aside.unlink()


def _record(path: Path, start: int, line: bytes, *, last: bool) -> dict[str, Any] | None:
    """None where there is none; only the last line may be cut short."""
    try:
        record: dict[str, Any] | None = json.loads(line) if line.strip() else None
    except ValueError as error:
        if not last:
            raise _not_json(path, f"the line at byte {start}", error) from error
        return None
    return record


def _lines_from_end(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Where each line of a file begins, and the line; the last comes first."""
    start, rest = file.seek(0, os.SEEK_END), b""
    while start:
        size = min(max(BLOCK, len(rest)), start)
        start -= size
        file.seek(start)
        rest, *lines = (file.read(size) + rest).splitlines(keepends=True)
        end = start + len(rest) + sum(map(len, lines))
        for line in reversed(lines):
            end -= len(line)
            yield end, line
    if rest:
        yield 0, rest
