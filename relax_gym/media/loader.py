"""Observations with media in any accepted form → the same observations with loaded items."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from relax_gym.config import MediaConfig
from relax_gym.errors import MediaError
from relax_gym.media.items import Audio, Image, Media, Video
from relax_gym.processing import MediaProcessor
from relax_gym.types import Message


class MediaLoader:
    """Loads what observations hold. One loader serves all episodes of a run.

    Args:
        config: limits, and how videos are sampled.
        processor: what the items are for: it says which rate audio is converted to, and its features of each new item
            are made here, off the event loop.
    """

    def __init__(self, config: MediaConfig | None = None, *, processor: MediaProcessor | None = None) -> None:
        self._config = config or MediaConfig()
        self._processor = processor

    async def load(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with every media part as `{"type": kind, kind: Media}`. The given ones are not changed.

        Raises:
            MediaError: names the source of what cannot be read, and why.
        """
        return [message if not _parts(message) else await self._loaded(message) for message in messages]

    async def _loaded(self, message: Message) -> Message:
        parts = [part if part["type"] == "text" else await self._part(part) for part in message["content"]]
        return {**message, "content": parts}

    async def _part(self, part: Mapping[str, Any]) -> Mapping[str, Any]:
        kind = part["type"]
        item = await asyncio.to_thread(_plain, part)
        if self._processor is not None:
            await asyncio.to_thread(self._processor.features, item)
        return {"type": kind, kind: item}

    def close(self) -> None:
        """End the worker processes. Idempotent."""


def _parts(message: Message) -> bool:
    return isinstance(message.get("content"), (list, tuple))


def _plain(part: Mapping[str, Any]) -> Media:
    value = part[part["type"]]
    if isinstance(value, Media):
        return value
    match part["type"]:
        case "image":
            return Image(pixels=np.array(value))
        case "audio":
            samples, rate = value
            return Audio(samples=np.array(samples, dtype=np.float32), rate=rate)
        case "video":
            frames, fps = np.array(value), float(part["fps"])
            times = np.arange(len(frames)) / fps
            return Video(
                frames=frames,
                times=times,
                indices=np.arange(len(frames)),
                total_frames=len(frames),
                duration=len(frames) / fps,
            )
    raise MediaError(str(part["type"]))
