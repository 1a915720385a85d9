"""Images and sounds as `/generate` takes them: data URIs that lose nothing, each made once."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np

from relax_gym.errors import SamplerError
from relax_gym.media.items import Audio, Image, Media, Video
from relax_gym.types import Placed


class WireMedia:
    """`image_data` and `audio_data` of requests. Items are encoded in a thread, once as long as they are held."""

    def __init__(self) -> None:
        self._made: WeakKeyDictionary[Media, str] = WeakKeyDictionary()

    async def body(self, media: Sequence[Placed]) -> dict[str, list[str]]:
        """The media of one request, in the order of their tokens."""
        if new := {placed.media for placed in media if placed.media not in self._made}:
            self._made.update(await asyncio.to_thread(lambda: [(item, data_uri(item)) for item in new]))
        out: dict[str, list[str]] = {}
        for placed in media:
            out.setdefault(f"{placed.media.kind}_data", []).append(self._made[placed.media])
        return out


def data_uri(item: Media) -> str:
    """PNG, or WAV of 32-bit floats.

    Raises:
        SamplerError: it is a video, whose frames servers choose and scale in their own way.
    """
    match item:
        case Image():
            return _uri("image/png", _png(item))
        case Audio():
            return _uri("audio/wav", _wav(item))
        case Video():
            raise SamplerError("videos cannot be sent to SGLang exactly as they are trained on; use the local sampler")
    raise SamplerError(f"{item!r} cannot be sent to SGLang")


def _uri(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _png(item: Image) -> bytes:
    import PIL.Image

    out = io.BytesIO()
    PIL.Image.fromarray(np.asarray(item.pixels)).save(out, "png", compress_level=1)
    return out.getvalue()


def _wav(item: Audio) -> bytes:
    import soundfile

    out = io.BytesIO()
    soundfile.write(out, item.samples, item.rate, format="WAV", subtype="FLOAT")
    return out.getvalue()
