"""Libraries that decode videos, each behind the same few methods. Frames are counted in the order they are shown."""

from __future__ import annotations

import bisect
import io
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_gym.errors import MediaError

Frame = NDArray[np.uint8]
"""[height, width, 3], RGB."""

Times = NDArray[np.float64]
THREADS = 2
"""Of one video. More would hold more frames at a time, and several workers decode at the same time."""
FORMATS = "mov,matroska,webm,avi,mpegts,mpeg,flv,asf,ogg,gif,apng,ivf,mxf,nut"
"""FFmpeg also reads playlists, which would have it read other files and addresses."""
SEEKS = 8
"""Key frames to try from before decoding from the first frame."""
EXACT = (b"ftyp", b"moov", b"mdat", b"wide", b"free")
MATROSKA = b"\x1a\x45\xdf\xa3"


class Unavailable(Exception):
    """A library is not installed or cannot be loaded here."""


class Decoder(ABC):
    """An open video."""

    size: tuple[int, int]
    """Width and height."""

    @abstractmethod
    def times(self) -> tuple[Times, float]:
        """Seconds at which each frame begins to be shown, ascending, and how long all of it lasts. Decodes nothing."""

    @abstractmethod
    def frames(self, indices: Sequence[int] | NDArray[np.int64], size: tuple[int, int]) -> Iterator[Frame]:
        """The frames of these numbers, ascending, scaled to (width, height).

        Raises:
            MediaError: one cannot be decoded.
        """

    def close(self) -> None:  # noqa: B027 (most have nothing to let go of)
        """Let go of the file."""


class PyAvDecoder(Decoder):
    """PyAV. Goes to the last key frame before a frame, unless it is nearer already.

    On the way it leaves out frames that no other needs, which saves about half of the decoding.
    """

    def __init__(self, source: Path | bytes) -> None:
        """Open a file, or the content of one. Raises Unavailable without PyAV, MediaError for what is no video."""
        try:
            import av
        except (ImportError, OSError) as error:
            raise Unavailable(str(error)) from error
        self._errors = (av.FFmpegError, OSError, ValueError)
        self._source, self._av_open = source, av.open
        self._open()
        self.size = self._stream.codec_context.width, self._stream.codec_context.height

    def _open(self) -> None:
        given = str(self._source) if isinstance(self._source, Path) else io.BytesIO(self._source)
        try:
            self._container: Any = self._av_open(given, mode="r", options={"format_whitelist": FORMATS})
        except self._errors as error:
            raise MediaError(f"cannot be read as a video: {error}") from error
        if not self._container.streams.video:
            self._container.close()
            raise MediaError("has no video stream")
        self._stream = self._container.streams.video[0]
        self._stream.codec_context.thread_count = THREADS
        self._coming: Iterator[Any] = iter(())
        self._at = -math.inf

    def times(self) -> tuple[Times, float]:
        """See `Decoder.times`: what the packets say."""
        try:
            packets = [
                (packet.pts, packet.duration or 0, packet.is_keyframe)
                for packet in self._container.demux(self._stream)
                if packet.size and not packet.is_discard
            ]
        except self._errors as error:
            raise MediaError(f"cannot be read as a video: {error}") from error
        if any(stamp is None for stamp, _, _ in packets):
            raise MediaError("has frames without a time; put the stream into a container, such as MP4")
        if not packets:
            return np.zeros(0), 0.0
        packets.sort()
        self._stamps = [stamp for stamp, _, _ in packets]
        self._keys = [stamp for stamp, _, key in packets if key]
        base = float(self._stream.time_base or 1)
        last = packets[-1][1] or self._typical_step()
        return np.array(self._stamps) * base, (self._stamps[-1] - self._stamps[0] + last) * base

    def _typical_step(self) -> int:
        steps = np.diff(self._stamps)
        return int(np.median(steps)) if len(steps) else round(1 / (self._stream.time_base or 1))

    def frames(self, indices: Sequence[int] | NDArray[np.int64], size: tuple[int, int]) -> Iterator[Frame]:
        """See `Decoder.frames`."""
        self._wanted = {self._stamps[index] for index in indices}
        for index in indices:
            try:
                frame = self._find(self._stamps[index])
            except self._errors as error:
                raise MediaError(f"frame {index} cannot be decoded: {error}") from error
            if frame is None or frame.is_corrupt:
                raise MediaError(f"frame {index} cannot be decoded: it is {'broken' if frame else 'missing'}")
            pixels = frame.reformat(width=size[0], height=size[1], format="rgb24").to_ndarray()
            yield np.rot90(pixels, round(frame.rotation / 90))

    def _find(self, stamp: int) -> Any:
        """The frame of a time stamp; None when there is none."""
        key = bisect.bisect_right(self._keys, stamp) - 1
        if key < 0 or not self._keys[key] <= self._at < stamp:
            self._go_before(stamp, key)
        frame = next((frame for frame in self._coming if frame.pts is not None and frame.pts >= stamp), None)
        self._at = math.inf if frame is None else frame.pts
        return frame if self._at == stamp else None

    def _go_before(self, stamp: int, key: int) -> None:
        """Have frames come from a key frame that is not after `stamp`: number `key`, or an earlier one.

        Some containers go to a later one than they are asked for. When nothing else helps, it is the first frame.
        """
        for number in range(key, max(key - SEEKS, -1), -1):
            self._container.seek(self._keys[number], stream=self._stream)
            self._coming = self._decoded()
            first = next(self._coming, None)
            if first is not None and first.pts is not None and first.pts <= stamp:
                self._coming = itertools.chain([first], self._coming)
                return
        self._container.close()
        self._open()
        self._coming = self._decoded()

    def _decoded(self) -> Iterator[Any]:
        for packet in self._container.demux(self._stream):
            self._stream.codec_context.skip_frame = "DEFAULT" if packet.pts in self._wanted else "NONREF"
            yield from packet.decode()

    def close(self) -> None:
        """See `Decoder.close`."""
        self._container.close()


class DecordDecoder(Decoder):
    """decord, which the distribution decord2 keeps alive.

    Only for MP4, MOV, Matroska and WebM: in MPEG-TS it takes wrong frames, in AVI it has no times. It tells the size
    only of a frame that it has decoded.
    """

    def __init__(self, source: Path | bytes) -> None:
        """Open a file, or the content of one. Raises Unavailable without decord, MediaError for what is no video."""
        try:
            import decord
        except (ImportError, OSError) as error:
            raise Unavailable(str(error)) from error
        head = _head(source)
        if head[4:] not in EXACT and head[:4] != MATROSKA:
            raise MediaError("cannot be read as a video: decord reads only MP4 and Matroska rightly; pip install av")
        self._source = source
        self._error: type[Exception] = decord.DECORDError
        self._open: Callable[..., Any] = decord.VideoReader
        self._reader = self._read()
        try:
            height, width, _ = self._reader[0].shape
        except (self._error, IndexError, RuntimeError) as error:
            raise MediaError(f"cannot be read as a video: {str(error).splitlines()[0]}") from error
        self.size = width, height

    def _read(self, **size: int) -> Any:
        given = str(self._source) if isinstance(self._source, Path) else io.BytesIO(self._source)
        try:
            return self._open(given, num_threads=1, **size)
        except (self._error, RuntimeError) as error:
            raise MediaError(f"cannot be read as a video: {str(error).splitlines()[0]}") from error

    def times(self) -> tuple[Times, float]:
        """See `Decoder.times`."""
        spans = np.asarray(self._reader.get_frame_timestamp(list(range(len(self._reader)))), dtype=np.float64)
        return (spans[:, 0], float(spans[-1, 1] - spans[0, 0])) if len(spans) else (np.zeros(0), 0.0)

    def frames(self, indices: Sequence[int] | NDArray[np.int64], size: tuple[int, int]) -> Iterator[Frame]:
        """See `Decoder.frames`."""
        if size != self.size:
            self._reader = self._read(width=size[0], height=size[1])
        for index in indices:
            try:
                yield _without_padding(self._reader[int(index)].asnumpy())
            except (self._error, RuntimeError) as error:
                raise MediaError(f"frame {index} cannot be decoded: {str(error).splitlines()[0]}") from error


def _without_padding(frame: Frame) -> Frame:
    """[height, width, 3] of what decord gives. Where FFmpeg ends rows with padding, which depends on the processor and
    on the width, it takes that for more channels."""
    height, width, _ = frame.shape
    return frame.reshape(height, -1)[:, : 3 * width].reshape(height, width, 3)


class TorchCodecDecoder(Decoder):
    """torchcodec. It tells the time of a frame only as it decodes it, so only a constant frame rate is read."""

    def __init__(self, source: Path | bytes) -> None:
        """Open a file, or its content. Raises Unavailable without torchcodec, MediaError for what is no video."""
        try:
            from torchcodec.decoders import VideoDecoder
        except (ImportError, OSError, RuntimeError) as error:
            raise Unavailable(str(error).splitlines()[0]) from error
        try:
            self._decoder: Any = VideoDecoder(source, dimension_order="NHWC")
        except (ValueError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            if "libtorchcodec" in reason:  # it is loaded at the first use: FFmpeg's libraries are missing
                raise Unavailable(reason) from error
            raise MediaError(f"cannot be read as a video: {reason}") from error
        self.size = self._decoder.metadata.width, self._decoder.metadata.height

    def times(self) -> tuple[Times, float]:
        """See `Decoder.times`."""
        count, meta = len(self._decoder), self._decoder.metadata
        start, end = meta.begin_stream_seconds or 0.0, meta.end_stream_seconds or 0.0
        return start + np.arange(count) * (end - start) / max(count, 1), end - start

    def frames(self, indices: Sequence[int] | NDArray[np.int64], size: tuple[int, int]) -> Iterator[Frame]:
        """See `Decoder.frames`."""
        from PIL.Image import Resampling, fromarray

        times, duration = self.times()
        for index in indices:
            try:
                frame = self._decoder.get_frame_at(int(index))
            except RuntimeError as error:
                raise MediaError(f"frame {index} cannot be decoded: {str(error).splitlines()[0]}") from error
            if abs(frame.pts_seconds - times[index]) > duration / len(times) / 2:
                raise MediaError(
                    "has a variable frame rate, of which torchcodec does not tell the times; pip install av"
                )
            pixels: Frame = frame.data.numpy()
            yield pixels if size == self.size else np.array(fromarray(pixels).resize(size, Resampling.BICUBIC))


def _head(source: Path | bytes) -> bytes:
    if isinstance(source, bytes):
        return source[:8]
    with source.open("rb") as file:
        return file.read(8)


DECODERS: dict[str, Callable[[Path | bytes], Decoder]] = {
    "av": PyAvDecoder,
    "decord": DecordDecoder,
    "torchcodec": TorchCodecDecoder,
}
"""In the order they are tried, by benchmarks/video_decoding.py: PyAV is the fastest, also to import, and takes the
least memory (importing decord takes 0.6 GB). torchcodec is last: it needs torch, which takes seconds to import."""
