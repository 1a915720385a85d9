"""What the sizes in a file of media say about where it should end, without decoding any of it."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import BinaryIO

MP4_BOXES = (b"ftyp", b"moov", b"moof", b"mdat")
ENDLESS = 0x7FFFF000
"""Lengths from here on are what programs write that do not know the length yet."""
EBML, SEGMENT = b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67"


def missing_bytes(source: Path | bytes) -> int:
    """How many bytes a file that was cut off lacks: MP4, MOV, Matroska, WebM and AVI tell; else 0."""
    with source.open("rb") if isinstance(source, Path) else io.BytesIO(source) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        return max(0, _promised(file, size) - size)


def _promised(file: BinaryIO, size: int) -> int:
    head = file.read(16)
    file.seek(0)
    if head[:4] == b"RIFF":
        length = int.from_bytes(head[4:8], "little")
        return 8 + length if length < ENDLESS and length != size else 0  # some count the first 8 bytes too
    if head[:4] == EBML:
        return _end_of_matroska(file)
    return _end_of_mp4(file, size) if head[4:8] in MP4_BOXES else 0


def _end_of_mp4(file: BinaryIO, size: int) -> int:
    """Where the last box ends."""
    end = 0
    while end + 8 <= size:
        file.seek(end)
        head = file.read(16)
        length, kind = int.from_bytes(head[:4], "big"), head[4:8]
        if length == 1:
            length = int.from_bytes(head[8:], "big")
        if length < 8 or (end + length > size and kind not in MP4_BOXES):  # to the end of the file; or no box
            return size
        end += length
    return end


def _end_of_matroska(file: BinaryIO) -> int:
    """Where the segment that follows the header ends; 0 where it does not say, as in a live stream."""
    file.seek(4)
    header = _number(file)
    file.seek(header or 0, os.SEEK_CUR)
    if file.read(4) != SEGMENT:
        return 0
    length = _number(file)
    return 0 if length is None else file.tell() + length


def _number(file: BinaryIO) -> int | None:
    """A number of EBML, as long as its leading zero bits say; None when it means "unknown"."""
    first = file.read(1)
    if not first or not first[0]:
        return None
    bits = first[0].bit_length()
    value = int.from_bytes(bytes([first[0] - (1 << (bits - 1))]) + file.read(8 - bits), "big")
    return None if value == (1 << (7 * (9 - bits))) - 1 else value
