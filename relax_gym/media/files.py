"""Items as files that people can open: PNG, WAV and MP4, each distinct item once."""

from __future__ import annotations

import io
import logging
import os
import wave
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from relax_gym.media.items import Audio, Image, Media, Video

log = logging.getLogger("relax_gym")
MIME = {"png": "image/png", "wav": "audio/wav", "mp4": "video/mp4"}
BACKLOG = 2**30
"""Most bytes of items that wait to be written."""
CLOCK, SOUND_RATE = 1000, 48000  # of MP4: times in milliseconds, a rate that AAC has and browsers play


class MediaFolder:
    """Writes items in a thread of its own, until they are `limit` bytes together. What is not kept is logged."""

    def __init__(self, path: Path, limit: float) -> None:
        self.path = path
        files = list(path.glob("*")) if path.is_dir() else []
        self._limit = limit
        self._used = sum(file.stat().st_size for file in files)
        self._known = {file.name for file in files}
        self._lost: set[str] = set()
        self._taken = self._done = 0  # bytes of items; each is written by one thread only
        self._behind = False
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="media")

    def keep(self, item: Media) -> dict[str, Any]:
        """What a line says of an item: its file and its size. The file is None if the item is known not to be kept.

        The file is there soon, unless it turns out only then that the folder is full or the item cannot be encoded.
        """
        name = f"{item.digest}.{suffix(item)}"
        if name not in self._known and self._has_room(item):
            self._known.add(name)
            self._taken += item.nbytes
            self._thread.submit(self._write, item, name)
        kept = name in self._known and name not in self._lost
        return {"file": f"{self.path.name}/{name}" if kept else None, **facts(item)}

    def close(self) -> None:
        """Wait until everything is written."""
        self._thread.shutdown()

    def _has_room(self, item: Media) -> bool:
        if self._used >= self._limit:
            return False
        late = self._taken - self._done + item.nbytes > BACKLOG
        if late and not self._behind:
            log.warning("media of episodes come faster than they are written to %s: some are not kept", self.path)
            self._behind = True
        return not late

    def _write(self, item: Media, name: str) -> None:
        try:
            if self._used < self._limit:
                self._used += write_file(item, self.path / name)
                self._warn_when_full()
            else:
                self._lost.add(name)
        except Exception as error:  # what cannot be kept must not end a run that can go on without
            self._lost.add(name)
            log.warning("%r is not kept: %s: %s", item, type(error).__name__, error)
        finally:
            self._done += item.nbytes

    def _warn_when_full(self) -> None:
        if self._used >= self._limit:
            log.warning(
                "%s holds %.3g GiB, media.keep_gib = %.3g: no more media of episodes are kept",
                self.path,
                self._used / 2**30,
                self._limit / 2**30,
            )


def write_file(item: Media, path: Path) -> int:
    """Write an item in one rename, with its folder; return how many bytes it has."""
    data = encode(item)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(data)
    os.replace(partial, path)
    return len(data)


def suffix(item: Media) -> str:
    """png, wav or mp4. Without PyAV a video is an animated PNG."""
    if isinstance(item, Video):
        return "mp4" if find_spec("av") else "png"
    return "wav" if isinstance(item, Audio) else "png"


def facts(item: Media) -> dict[str, Any]:
    """Size and length of an item: pixels, seconds, samples or frames per second."""
    match item:
        case Image():
            return {"width": item.pixels.shape[1], "height": item.pixels.shape[0]}
        case Audio():
            return {"seconds": item.seconds, "rate": item.rate}
        case Video():
            count, height, width, _ = item.frames.shape
            size = {"width": width, "height": height, "frames": count, "seconds": item.duration}
            return {**size, "fps": item.sampled_fps, "times": item.times.tolist(), "sound": item.audio is not None}
    raise TypeError(type(item).__name__)


def encode(item: Media) -> bytes:
    """PNG, 16-bit WAV, or MP4 (H.264, AAC) that shows each frame until the time of the next, as `suffix` says."""
    file = io.BytesIO()
    match item:
        case Image():
            from PIL.Image import fromarray

            fromarray(item.pixels).save(file, "PNG")
        case Audio():
            _write_wav(item, file)
        case Video() if suffix(item) == "mp4":
            _write_mp4(item, file)
        case Video():
            _write_apng(item, file)
    return file.getvalue()


def _write_wav(audio: Audio, file: io.BytesIO) -> None:
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, audio.rate, len(audio.samples), "NONE", ""))
        out.writeframes(np.rint(audio.samples.clip(-1, 1) * 32767).astype("<i2").tobytes())


def _starts(video: Video) -> list[int]:
    """When each frame is shown, and when the last one ends: milliseconds, increasing. The first comes at once."""
    starts = [0]
    for seconds in [*video.times[1:].tolist(), video.duration]:
        starts.append(max(round(CLOCK * seconds), starts[-1] + 1))
    return starts


def _write_apng(video: Video, file: io.BytesIO) -> None:
    from PIL.Image import fromarray

    first, *rest = map(fromarray, video.frames)
    lengths = np.diff(_starts(video)).tolist()
    first.save(file, "PNG", save_all=True, append_images=rest, duration=lengths, loop=0)


def _write_mp4(video: Video, file: io.BytesIO) -> None:
    import av

    _, height, width, _ = video.frames.shape
    starts = _starts(video)
    with av.open(file, "w", format="mp4") as container:
        stream: Any = container.add_stream("libx264", rate=CLOCK)
        stream.width, stream.height, stream.pix_fmt = width + width % 2, height + height % 2, "yuv420p"
        stream.time_base = stream.codec_context.time_base = Fraction(1, CLOCK)
        # Without B-frames packets come in the order of frames; one thread leaves the others to the training.
        stream.options = {"crf": "18", "preset": "veryfast", "bf": "0", "threads": "1"}
        sound: Any = container.add_stream("aac", rate=SOUND_RATE) if video.audio else None
        packets: list[Any] = []
        for frame, start in zip(video.frames, starts, strict=False):
            even = np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
            picture = av.VideoFrame.from_ndarray(even, format="rgb24")
            picture.pts, picture.time_base = start, Fraction(1, CLOCK)
            packets += stream.encode(picture)
        for packet, length in zip([*packets, *stream.encode(None)], np.diff(starts).tolist(), strict=True):
            packet.duration = length
            container.mux(packet)
        if video.audio is not None:
            heard: Any = av.AudioFrame.from_ndarray(video.audio.samples[None].copy(), format="fltp", layout="mono")
            heard.sample_rate = video.audio.rate
            container.mux([*sound.encode(heard), *sound.encode(None)])
