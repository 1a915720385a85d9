"""What a content part holds → where its item comes from: something encoded that a worker decodes, or an array."""

from __future__ import annotations

import base64
import binascii
import hashlib
import math
import os
import threading
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from relax_gym.errors import MediaError
from relax_gym.media.items import KINDS, Kind

FORMS = "a path, URL, data URI, bytes, file, PIL image, array, tensor or Hugging Face dict"
_reading = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Url:
    """An address that a worker downloads."""

    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A file's content, or where it is. `key` is equal for equal content; `name` is for messages."""

    data: Path | bytes | Url
    key: Hashable
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """Samples, pixels or frames in memory, and how many there are in a second."""

    value: Any
    rate: float | None
    name: str


def find_source(kind: Kind, part: Mapping[str, Any]) -> Encoded | Plain:
    """Where the item of a content part comes from. Reads file-like objects; opens nothing else.

    Raises:
        MediaError: it is in no form that is known.
    """
    if kind not in KINDS:
        raise MediaError(f"is no type of a part; give text, {', '.join(KINDS)}")
    if part.get(kind) is None:
        raise MediaError(f"the part has nothing under its key {kind!r}; give {FORMS}")
    value = part[kind]
    rate = part.get("sampling_rate" if kind == "audio" else "fps")
    if isinstance(value, Mapping):
        value, rate = _from_mapping(kind, value, rate)
    elif isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Real):
        value, rate = value
    if isinstance(value, str):
        return _from_text(value)
    if isinstance(value, os.PathLike):
        return _from_path(Path(value))
    if hasattr(value, "read"):
        value = _read(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _from_bytes(bytes(value), f"bytes ({len(value):,})")
    return Plain(value=value, rate=rate, name=describe(value))


def is_positive(value: object) -> bool:
    """Whether it is a number above 0, and finite."""
    return isinstance(value, Real) and 0 < float(value) < math.inf


def describe(value: Any) -> str:
    """A short name of something in memory."""
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__}" + (f" of shape {tuple(shape)}" if shape is not None else "")


def _from_mapping(kind: Kind, value: Mapping[str, Any], rate: Any) -> tuple[Any, Any]:
    if value.get("array") is not None:
        return value["array"], value.get("sampling_rate", rate)
    if value.get("frames") is not None:
        return value["frames"], value.get("fps", rate)
    found = next((value[key] for key in ("bytes", "path", "url", kind) if value.get(key) is not None), None)
    if found is None:
        raise MediaError(f"a dict with keys {sorted(map(str, value))}; give bytes, path, url, array or frames")
    return found, rate


def _read(file: Any) -> Any:
    """All that a file-like object holds, from its start if it can be told to go there. It is left where it was."""
    try:
        with _reading:  # several episodes may have been given the same one
            if not getattr(file, "seekable", bool)():
                return file.read()
            place = file.tell()
            file.seek(0)
            data = file.read()
            file.seek(place)
            return data
    except Exception as error:  # it may be anything
        raise MediaError(f"a {type(file).__name__} that cannot be read: {error}") from error


def _from_text(text: str) -> Encoded:
    scheme = text.partition(":")[0].lower()
    if scheme == "data":
        return _from_data_uri(text)
    if scheme in ("http", "https"):
        try:
            parts = urlsplit(text)
        except ValueError as error:
            raise MediaError(f"a URL of {len(text)} characters that is malformed") from error
        host = parts.netloc.rpartition("@")[2]
        name = f"{parts.scheme}://{host}{parts.path}"  # a query or a password may be secret
        return Encoded(data=Url(address=text), key=text, name=name)
    if scheme == "file":
        return _from_path(Path(unquote(urlsplit(text).path)))
    return _from_path(Path(text))


def _from_path(path: Path) -> Encoded:
    try:
        path = path.expanduser()
        state = path.stat()
    except (OSError, ValueError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise MediaError(f"{str(path)[:200]}: {reason}; give {FORMS}") from error
    if not path.is_file():
        raise MediaError(f"{path}: not a file; give {FORMS}")
    return Encoded(data=path, key=(str(path.resolve()), state.st_mtime_ns, state.st_size), name=str(path))


def _from_data_uri(text: str) -> Encoded:
    head, comma, body = text.partition(",")
    name = f"data URI {head[5:60]!r}"
    if not comma:
        raise MediaError(f"{name}: has no comma; a data URI is data:TYPE;base64,DATA")
    data = unquote_to_bytes(body)
    try:
        if head.lower().endswith(";base64"):
            data = base64.b64decode(b"".join(data.split()), validate=True)
    except binascii.Error as error:
        raise MediaError(f"{name}: {error}; a data URI is data:TYPE;base64,DATA") from error
    return _from_bytes(data, name)


def _from_bytes(data: bytes, name: str) -> Encoded:
    return Encoded(data=data, key=hashlib.blake2b(data, digest_size=16).digest(), name=name)
