"""Items as files that people can open: PNG, WAV and MP4, each distinct item once."""

from __future__ import annotations

import io
import logging
import os
import wave
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from relax_gym.media.items import Audio, Image, Media, Video

log = logging.getLogger("relax_gym")
SUFFIXES = {"image": "png", "audio": "wav", "video": "mp4"}
MIME = {"png": "image/png", "wav": "audio/wav", "mp4": "video/mp4"}


class MediaFolder:
    """Writes items in a thread of its own, until they are `limit` bytes together. An item that fails is logged."""

    def __init__(self, path: Path, limit: float) -> None:
        self.path = path
        self._limit = limit
        self._used = sum(file.stat().st_size for file in path.glob("*")) if path.is_dir() else 0
        self._known: set[str] = {file.name for file in path.glob("*")} if path.is_dir() else set()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="media")

    def keep(self, item: Media) -> dict[str, Any]:
        """What a line says of an item, whose file is there soon, unless the folder is full."""
        name = f"{item.digest}.{SUFFIXES[item.kind]}"
        if name not in self._known and self._limit > 0:
            self._known.add(name)
            self._thread.submit(self._write, item, name)
        return {"file": f"{self.path.name}/{name}", **facts(item)}

    def close(self) -> None:
        """Wait until everything is written."""
        self._thread.shutdown()

    def _write(self, item: Media, name: str) -> None:
        if self._used >= self._limit:
            return
        try:
            data = encode(item)
            self.path.mkdir(parents=True, exist_ok=True)
            partial = self.path / f".{name}.partial"
            partial.write_bytes(data)
            os.replace(partial, self.path / name)
        except Exception as error:  # what cannot be kept must not end a run that can go on without
            log.warning("%r is not kept: %s: %s", item, type(error).__name__, error)
            return
        self._used += len(data)
        if self._used >= self._limit:
            log.warning(
                "%s holds %.1f GiB, media.keep_gib = %g: no more media of episodes are kept",
                self.path,
                self._used / 2**30,
                self._limit / 2**30,
            )


def facts(item: Media) -> dict[str, Any]:
    """Size and length of an item."""
    match item:
        case Image():
            return {"width": item.pixels.shape[1], "height": item.pixels.shape[0]}
        case Audio():
            return {"seconds": item.seconds, "rate": item.rate}
        case Video():
            return {
                "width": item.frames.shape[2],
                "height": item.frames.shape[1],
                "times": item.times.tolist(),
                "seconds": item.duration,
            }
    raise TypeError(type(item).__name__)


def encode(item: Media) -> bytes:
    """PNG, 16-bit WAV, or MP4 (H.264, AAC) that shows each frame as long as the model would see it.

    Raises:
        ImportError: a video, and PyAV is not installed.
    """
    match item:
        case Image():
            from PIL.Image import fromarray

            file = io.BytesIO()
            fromarray(item.pixels).save(file, "PNG")
            return file.getvalue()
        case Audio():
            return _wav(item)
        case Video():
            return _mp4(item)
    raise TypeError(type(item).__name__)


def _wav(audio: Audio) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, audio.rate, len(audio.samples), "NONE", ""))
        out.writeframes(np.rint(audio.samples.clip(-1, 1) * 32767).astype("<i2").tobytes())
    return file.getvalue()


def _mp4(video: Video) -> bytes:
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream: Any = container.add_stream("libx264", rate=Fraction(video.sampled_fps).limit_denominator(1000))
        _, height, width, _ = video.frames.shape
        stream.width, stream.height, stream.pix_fmt = width + width % 2, height + height % 2, "yuv420p"
        stream.options = {"crf": "18", "preset": "veryfast"}
        voice: Any = container.add_stream("aac", rate=video.audio.rate) if video.audio else None
        for frame in video.frames:
            even = np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
            container.mux(stream.encode(av.VideoFrame.from_ndarray(even, format="rgb24")))
        container.mux(stream.encode(None))
        if video.audio is not None:
            sound: Any = av.AudioFrame.from_ndarray(video.audio.samples[None].copy(), format="fltp", layout="mono")
            sound.sample_rate = video.audio.rate
            container.mux([*voice.encode(sound), *voice.encode(None)])
    return file.getvalue()
