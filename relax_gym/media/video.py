"""Videos and lists of frames → a few frames, and when each was shown."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from relax_gym.errors import MediaError
from relax_gym.media.decoders import DECODERS, Decoder, Frame, Unavailable
from relax_gym.media.items import Audio, Video

log = logging.getLogger("relax_gym")
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
    twice, which is why there may be fewer.
    """
    wanted = max(plan.min_frames, int(duration * plan.fps + SLACK), 1)
    count = min(wanted, plan.max_frames, len(times))
    if count == len(times):
        return np.arange(count)
    moments = times[0] + np.arange(count) * duration / count
    return np.unique(np.searchsorted(times, moments + SLACK, side="right") - 1)


def read_video(source: Path | bytes, plan: VideoPlan, *, decoders: Sequence[str] = tuple(DECODERS)) -> Video:
    """Frames of an encoded video. Only what is needed is decoded, and no more than one frame is held besides.

    `decoders` are tried in this order until one is installed and works. A stream that was cut off gives the frames
    that are there.

    Raises:
        MediaError: it is no video, is broken or has no frames; or no decoder is installed.
    """
    if source == b"":
        raise MediaError("is empty")
    decoder = _open(source, decoders)
    try:
        width, height = decoder.size
        if width * height > plan.max_pixels:
            raise MediaError(f"has {width} x {height} pixels, media.max_pixels = {plan.max_pixels}")
        times, duration = decoder.times()
        if not len(times) or duration <= 0:
            raise MediaError("has no frames")
        indices = choose_frames(times, duration, plan)
        frames = np.stack(list(decoder.frames(indices, _scaled(width, height, plan.resize_pixels))))
        return Video(
            frames=frames,
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
    missing = []
    for name in names:
        try:
            return DECODERS[name](source)
        except Unavailable as error:
            missing.append(f"{name}: {error}")
            log.info("video decoder %s cannot be used: %s", name, error)
    raise MediaError(f"needs a video decoder: pip install 'relax-gym[media]' ({'; '.join(missing)})")


def _scaled(width: int, height: int, most: int | None) -> tuple[int, int]:
    if most is None or width * height <= most:
        return width, height
    scale = (most / (width * height)) ** 0.5
    return max(1, int(width * scale)), max(1, int(height * scale))


def _sound(source: Path | bytes, rate: int, max_seconds: float) -> Audio | None:
    from relax_gym.media.audio import sound_track

    return sound_track(source, rate=rate, max_seconds=max_seconds)
