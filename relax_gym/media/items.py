"""Images, sounds and videos once they are loaded: read-only arrays, named by a hash of what they hold."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

Kind = Literal["image", "video", "audio"]
KINDS: tuple[Kind, ...] = ("image", "video", "audio")


class Media:
    """What an image, an audio clip and a video have in common. Equal content is one item: it has the same digest."""

    __slots__: tuple[str, ...] = ()
    kind: ClassVar[Kind]
    digest: str

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Media) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __reduce__(self) -> tuple[Any, ...]:
        values = {name: getattr(self, name) for name in self.__slots__ if name != "__weakref__"}
        return _restore, (type(self), values)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False, weakref_slot=True)
class Image(Media):
    """`pixels` [height, width, 3], RGB, uint8."""

    kind: ClassVar[Kind] = "image"
    pixels: NDArray[np.uint8]
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        _check("an image", self.pixels, np.uint8, "[height, width, 3]", (None, None, 3))
        _settle(self, self.kind, self.pixels)

    def __repr__(self) -> str:
        height, width, _ = self.pixels.shape
        return f"<image {width}x{height} {self.digest[:8]}>"

    @property
    def nbytes(self) -> int:
        """Bytes of the pixels."""
        return self.pixels.nbytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False, weakref_slot=True)
class Audio(Media):
    """`samples` [n], one channel, float32 in about [-1, 1], `rate` of them in a second."""

    kind: ClassVar[Kind] = "audio"
    samples: NDArray[np.float32]
    rate: int
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        _check("audio", self.samples, np.float32, "[samples]", (None,))
        if self.rate < 1:
            raise ValueError(f"audio has a rate of {self.rate} samples per second; it must be positive")
        _settle(self, f"{self.kind} {self.rate}", self.samples)

    def __repr__(self) -> str:
        return f"<audio {self.seconds:.2f} s at {self.rate} Hz {self.digest[:8]}>"

    @property
    def seconds(self) -> float:
        """How long it lasts."""
        return len(self.samples) / self.rate

    @property
    def nbytes(self) -> int:
        """Bytes of the samples."""
        return self.samples.nbytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False, weakref_slot=True)
class Video(Media):
    """Some frames of a video, and when they were shown.

    Attributes:
        frames: [n, height, width, 3], RGB, uint8.
        times: [n] seconds from the start of the video, not decreasing.
        indices: [n] numbers of these frames among all of the video's.
        total_frames: how many frames the video has.
        duration: seconds that the whole video lasts.
        audio: its sound track, of the whole video, if it has one and it was asked for.
    """

    kind: ClassVar[Kind] = "video"
    frames: NDArray[np.uint8]
    times: NDArray[np.float64]
    indices: NDArray[np.int64]
    total_frames: int
    duration: float
    audio: Audio | None = None
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        _check("a video", self.frames, np.uint8, "[frames, height, width, 3]", (None, None, None, 3))
        count = len(self.frames)
        for name in ("times", "indices"):
            if getattr(self, name).shape != (count,):
                raise ValueError(f"a video of {count} frames has {name} of shape {getattr(self, name).shape}")
        sound = self.audio.digest if self.audio else ""
        _settle(self, f"{self.kind} {self.total_frames} {self.duration} {sound}", self.frames, self.times, self.indices)

    def __repr__(self) -> str:
        count, height, width, _ = self.frames.shape
        return f"<video {count} frames {width}x{height} {self.duration:.2f} s {self.digest[:8]}>"

    @property
    def fps(self) -> float:
        """Frames per second of the video itself."""
        return self.total_frames / self.duration

    @property
    def sampled_fps(self) -> float:
        """Frames per second of the frames that are here."""
        return len(self.frames) / self.duration

    def thinned(self, count: int) -> Video:
        """The same video with `count` of its frames, spread evenly from its first to its last."""
        kept = np.rint(np.linspace(0, len(self.frames) - 1, count)).astype(np.int64)
        frames, times, indices = self.frames[kept], self.times[kept], self.indices[kept]
        return dataclasses.replace(self, frames=frames, times=times, indices=indices)

    @property
    def nbytes(self) -> int:
        """Bytes of the frames and the sound track."""
        return self.frames.nbytes + (self.audio.nbytes if self.audio else 0)


def _restore(kind: type[Media], values: dict[str, Any]) -> Media:
    """A pickled item as it was: its arrays are read-only, which pickle forgets."""
    item = kind.__new__(kind)
    for name, value in values.items():
        if isinstance(value, np.ndarray):
            value.setflags(write=False)
        object.__setattr__(item, name, value)
    return item


def _check(
    what: str, array: NDArray[np.generic], dtype: type[np.generic], form: str, shape: tuple[int | None, ...]
) -> None:
    fits = array.ndim == len(shape) and all(
        want in (None, have) for want, have in zip(shape, array.shape, strict=False)
    )
    if array.dtype != dtype or not fits or not array.size:
        raise ValueError(
            f"{what} is an array {form} of {dtype.__name__} that is not empty; got {list(array.shape)} of {array.dtype}"
        )


def _settle(item: Media, header: str, *arrays: NDArray[np.generic]) -> None:
    """Freeze the arrays and give the item its digest."""
    digest = hashlib.blake2b(header.encode(), digest_size=16)
    for array in arrays:
        array.setflags(write=False)
        digest.update(str(array.shape).encode())
        digest.update(np.ascontiguousarray(array).data)
    object.__setattr__(item, "digest", digest.hexdigest())
