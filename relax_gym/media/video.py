"""Videos and lists of frames → a few frames, and when each was shown."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from relax_gym.errors import MediaError
from relax_gym.media.containers import missing_bytes
from relax_gym.media.decoders import DECODERS, Decoder, Frame
from relax_gym.media.items import Audio, Video

log = logging.getLogger("relax_gym")
_failed: set[str] = set()
"""Decoders of which a failure was logged in this process."""
SLACK = 1e-6
"""Seconds by which a time may miss the frame it means, through rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoPlan:
    """Which frames to take, and how.

    `fps` frames of each second, at least `min_frames` (as far as there are so many) and at most `max_frames`, evenly
    spread from the first on. A frame with more than `max_pixels` is refused, one with more than `resize_pixels` scaled
    down to that. With `sound_rate` the sound track is read too, at so many samples a second, `max_seconds` at most.
    """

    fps: float
    min_frames: int
    max_frames: int
    max_pixels: int
    resize_pixels: int | None = None
    sound_rate: int | None = None
    max_seconds: float = 600.0


def choose_frames(times: NDArray[np.float64], duration: float, plan: VideoPlan) -> NDArray[np.int64]:
    """Numbers of the frames to take, ascending, of those that begin to be shown at `times` [n].

    The frame of a moment is the one that is shown then, so a variable frame rate changes nothing. No frame is taken
    twice, which is why there may be fewer; where that leaves less than `min_frames`, so many are spread by number.
    """
    wanted = max(plan.min_frames, int(duration * plan.fps + SLACK), 1)
    count = min(wanted, plan.max_frames, len(times))
    if count == len(times):
        return np.arange(count)
    moments = times[0] + np.arange(count) * duration / count
    chosen = np.unique(np.searchsorted(times, moments + SLACK, side="right") - 1)
    least = min(plan.min_frames, count)
    return chosen if len(chosen) >= least else np.arange(least) * len(times) // least


def read_video(source: Path | bytes, plan: VideoPlan, *, decoders: Sequence[str] = tuple(DECODERS)) -> Video:
    """Frames of an encoded video. Only what is needed is decoded, and only the frames that are taken are held.

    `decoders` are tried in this order until one is installed and works. A file that was cut off is refused when its
    container says so (MP4, MOV, Matroska, WebM, AVI); of a stream, which has no end of its own, there are the frames
    that came.

    Raises:
        MediaError: it is no video, is broken, cut off or has no frames; or no decoder works here.
    """
    if source == b"" or (isinstance(source, Path) and source.is_file() and not source.stat().st_size):
        raise MediaError("is empty")
    try:
        missing = missing_bytes(source)
    except OSError as error:
        raise MediaError(f"cannot be read: {error}") from error
    if missing:
        raise MediaError(f"was cut off: its last {missing:,} bytes are missing")
    decoder = _open(source, decoders)
    try:
        width, height = decoder.size
        if width * height > plan.max_pixels:
            raise MediaError(f"has {width} x {height} pixels, media.max_pixels = {plan.max_pixels}")
        times, duration = decoder.times()
        if not len(times) or duration <= 0:
            raise MediaError("has no frames")
        indices = choose_frames(times, duration, plan)
        return Video(
            frames=_gather(decoder.frames(indices, _scaled(width, height, plan.resize_pixels)), len(indices)),
            times=times[indices] - times[0],
            indices=indices,
            total_frames=len(times),
            duration=duration,
            audio=None if plan.sound_rate is None else _sound(source, plan.sound_rate, plan.max_seconds),
        )
    finally:
        decoder.close()


def video_of_frames(frames: Sequence[Frame], fps: float, plan: VideoPlan, audio: Audio | None = None) -> Video:
    """Frames in memory, `fps` of them a second, as a video.

    Raises:
        MediaError: there are none, or they differ in size.
    """
    sizes = sorted({frame.shape for frame in frames})
    if len(sizes) != 1:
        raise MediaError(f"has frames of different sizes: {sizes}" if sizes else "has no frames")
    times, duration = np.arange(len(frames)) / fps, len(frames) / fps
    indices = choose_frames(times, duration, plan)
    return Video(
        frames=np.stack([frames[index] for index in indices]),
        times=times[indices],
        indices=indices,
        total_frames=len(frames),
        duration=duration,
        audio=audio,
    )


def _open(source: Path | bytes, names: Sequence[str]) -> Decoder:
    reasons = []
    for name in names:
        try:
            return DECODERS[name](source)
        except MediaError:
            raise
        except Exception as error:  # Unavailable, or whatever a library of another version does when it is used
            reasons.append(f"{name}: {str(error) or type(error).__name__}")
            if name not in _failed:
                log.warning("cannot decode videos with %s", reasons[-1])
            _failed.add(name)
    raise MediaError(f"needs a video decoder: pip install 'relax-gym[media]' ({'; '.join(reasons)})")


def _gather(frames: Iterator[Frame], count: int) -> Frame:
    """[count, height, width, 3], filled as they come, so that none is held twice."""
    first = next(frames)
    gathered = np.empty((count, *first.shape), dtype=np.uint8)
    gathered[0] = first
    for number, frame in enumerate(frames, start=1):
        if frame.shape != first.shape:
            raise MediaError(f"has frames of different sizes: {[first.shape, frame.shape]}")
        gathered[number] = frame
    return gathered


def _scaled(width: int, height: int, most: int | None) -> tuple[int, int]:
    if most is None or width * height <= most:
        return width, height
    scale = (most / (width * height)) ** 0.5
    return max(1, int(width * scale)), max(1, int(height * scale))


def _sound(source: Path | bytes, rate: int, max_seconds: float) -> Audio | None:
    from relax_gym.media.audio import sound_track

    return sound_track(source, rate=rate, max_seconds=max_seconds)
