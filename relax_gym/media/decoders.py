"""Libraries that decode videos, each behind the same few methods. Frames are counted in the order they are shown."""

from __future__ import annotations

import io
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
    """PyAV. Goes to the last key frame before a frame, unless it is nearer already."""

    def __init__(self, source: Path | bytes) -> None:
        """Open a file, or the content of one. Raises Unavailable without PyAV, MediaError for what is no video."""
        try:
            import av
        except ImportError as error:
            raise Unavailable(str(error)) from error
        self._errors = (av.FFmpegError, OSError, ValueError)
        try:
            self._container: Any = av.open(str(source) if isinstance(source, Path) else io.BytesIO(source), mode="r")
        except self._errors as error:
            raise MediaError(f"cannot be read as a video: {error}") from error
        if not self._container.streams.video:
            self._container.close()
            raise MediaError("has no video stream")
        self._stream = self._container.streams.video[0]
        self._stream.thread_type = "AUTO"
        self._coming: Iterator[Any] = iter(())
        self._at = -math.inf
        self.size = self._stream.codec_context.width, self._stream.codec_context.height

    def times(self) -> tuple[Times, float]:
        """See `Decoder.times`: what the packets say."""
        try:
            packets = [
                (packet.pts if packet.pts is not None else packet.dts, packet.duration or 0, packet.is_keyframe)
                for packet in self._container.demux(self._stream)
                if packet.size
            ]
        except self._errors as error:
            raise MediaError(f"cannot be read as a video: {error}") from error
        packets = sorted(packet for packet in packets if packet[0] is not None)
        self._stamps = [stamp for stamp, _, _ in packets]
        self._keys = [stamp for stamp, _, key in packets if key]
        if not packets:
            return np.zeros(0), 0.0
        base = float(self._stream.time_base or 1)
        last = packets[-1][1] or self._typical_step()
        return np.array(self._stamps) * base, (self._stamps[-1] - self._stamps[0] + last) * base

    def _typical_step(self) -> int:
        steps = np.diff(self._stamps)
        return int(np.median(steps)) if len(steps) else round(1 / (self._stream.time_base or 1))

    def frames(self, indices: Sequence[int] | NDArray[np.int64], size: tuple[int, int]) -> Iterator[Frame]:
        """See `Decoder.frames`."""
        for index in indices:
            try:
                frame = self._find(self._stamps[index])
            except self._errors as error:
                raise MediaError(f"frame {index} cannot be decoded: {error}") from error
            if frame is None:
                raise MediaError(f"frame {index} cannot be decoded: it is not where its packet says")
            yield frame.reformat(width=size[0], height=size[1], format="rgb24").to_ndarray()

    def _find(self, stamp: int) -> Any:
        """The frame of a time stamp; None when there is none."""
        key = max((key for key in self._keys if key <= stamp), default=self._stamps[0])
        starts = [key, self._stamps[0]]  # some containers go to a later key frame than they are asked for
        if key <= self._at < stamp:
            starts.insert(0, None)
        for start in starts:
            if start is not None:
                self._container.seek(start, stream=self._stream)
                self._coming = self._container.decode(self._stream)
            frame = next((frame for frame in self._coming if frame.pts is not None and frame.pts >= stamp), None)
            if frame is not None:
                self._at = frame.pts
                if frame.pts == stamp:
                    return frame
        return None

    def close(self) -> None:
        """See `Decoder.close`."""
        self._container.close()


class DecordDecoder(Decoder):
    """decord, which the distribution decord2 keeps alive."""

    def __init__(self, source: Path | bytes) -> None:
        """Open a file, or the content of one. Raises Unavailable without decord, MediaError for what is no video."""
        try:
            import decord
        except (ImportError, OSError) as error:
            raise Unavailable(str(error)) from error
        self._source = source
        self._error: type[Exception] = decord.DECORDError
        self._open: Callable[..., Any] = decord.VideoReader
        self._reader = self._read()
        try:
            height, width, _ = self._reader[0].shape
        except (self._error, IndexError, RuntimeError) as error:
            raise MediaError(f"cannot be read as a video: {error}") from error
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
                yield self._reader[int(index)].asnumpy()
            except (self._error, RuntimeError) as error:
                raise MediaError(f"frame {index} cannot be decoded: {str(error).splitlines()[0]}") from error


class TorchCodecDecoder(Decoder):
    """torchcodec. It tells the times of frames only as it decodes them: they are taken as equally far apart."""

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

        for index in indices:
            try:
                frame: Frame = self._decoder[int(index)].numpy()
            except RuntimeError as error:
                raise MediaError(f"frame {index} cannot be decoded: {str(error).splitlines()[0]}") from error
            yield frame if size == self.size else np.array(fromarray(frame).resize(size, Resampling.BICUBIC))


DECODERS: dict[str, Callable[[Path | bytes], Decoder]] = {
    "av": PyAvDecoder,
    "decord": DecordDecoder,
    "torchcodec": TorchCodecDecoder,
}
"""In the order they are tried, the fastest in benchmarks/video_decoding.py first; torchcodec is last because it needs
torch, which takes a worker longer to import than most videos to read."""
