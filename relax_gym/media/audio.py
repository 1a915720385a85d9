"""Sound files and arrays of every kind → one channel of float32 at one rate."""

from __future__ import annotations

import io
import itertools
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_gym.errors import MediaError
from relax_gym.media.containers import missing_bytes
from relax_gym.media.images import to_array
from relax_gym.media.items import Audio
from relax_gym.media.sources import is_positive

MOST_CHANNELS = 16
Samples = NDArray[np.float32]


def read_audio(source: Path | bytes, *, rate: int | None, max_seconds: float) -> Audio:
    """An encoded sound as one channel, at `rate` samples per second or, when that is None, at its own.

    soundfile reads it, or PyAV what soundfile cannot (AAC, WebM). A file that was cut off is refused when its format
    says so (WAV, FLAC, MP4, WebM); of a stream, such as MP3, there are the samples that came.

    Raises:
        MediaError: it is no sound, is broken, cut off, empty, or longer than `max_seconds`.
    """
    try:
        import soundfile
    except ImportError as error:
        raise MediaError("reading it needs soundfile: pip install 'relax-gym[media]'") from error
    if source == b"":
        raise MediaError("is empty")
    if missing := missing_bytes(source):
        raise MediaError(f"was cut off: its last {missing:,} bytes are missing")
    try:
        with soundfile.SoundFile(source if isinstance(source, Path) else io.BytesIO(source)) as file:
            _check_length(file.frames / file.samplerate, max_seconds)
            samples, own = file.read(dtype="float32", always_2d=True).mean(axis=1), file.samplerate
    except soundfile.LibsndfileError as error:
        track = _decode(source, max_seconds, str(error))
        if track is None:
            raise MediaError("has no sound track") from error
        samples, own, _ = track
    return _audio(samples, own, rate, max_seconds)


def audio_of(value: Any, own_rate: float | None, *, rate: int | None, max_seconds: float) -> Audio:
    """An array or tensor [samples], [channels, samples] or [samples, channels] with `own_rate` samples per second.

    Integers are scaled from their range to [-1, 1).

    Raises:
        MediaError: it has no rate, is no sound, is empty, not finite, or longer than `max_seconds`.
    """
    if own_rate is None:
        raise MediaError(
            "is an array without a rate; give (samples, rate), {'array': samples, 'sampling_rate': rate} or the part "
            "a key sampling_rate"
        )
    if not (is_positive(own_rate) and own_rate == int(own_rate)):
        raise MediaError(f"has a rate of {own_rate!r}; it must be a whole positive number of samples per second")
    return _audio(_one_channel(_floats(to_array(value))), int(own_rate), rate, max_seconds)


def sound_track(source: Path | bytes, *, rate: int, max_seconds: float) -> Audio | None:
    """The first sound track of a video at `rate` samples per second, from the first frame on; None when it is silent.

    Raises:
        MediaError: it is broken, or longer than `max_seconds`.
    """
    track = _decode(source, max_seconds, "it is a video", rate)
    if track is None or not track[0].size:
        return None
    samples, own, late = track
    _check_length(late + len(samples) / own, max_seconds)
    shift = round(late * own)
    silence = np.zeros(max(shift, 0), dtype=np.float32)
    samples = np.concatenate([silence, samples[max(-shift, 0) :]])
    return _audio(samples, own, rate, max_seconds) if samples.size else None


def _audio(samples: Samples, own: int, rate: int | None, max_seconds: float) -> Audio:
    if not samples.size:
        raise MediaError("has no samples")
    if not np.isfinite(samples).all():
        raise MediaError("has samples that are NaN or infinite")
    _check_length(len(samples) / own, max_seconds)
    if rate is not None and rate != own:
        try:
            import librosa
        except ImportError as error:
            raise MediaError(f"from {own} to {rate} Hz needs librosa: pip install 'relax-gym[media]'") from error
        samples, own = librosa.resample(samples, orig_sr=own, target_sr=rate), rate
    return Audio(samples=np.array(samples, dtype=np.float32), rate=own)


def _check_length(seconds: float, most: float) -> None:
    if seconds > most:
        raise MediaError(f"lasts {seconds:.1f} s, media.audio_max_seconds = {most:g}")


def _floats(array: NDArray[Any]) -> Samples:
    if np.issubdtype(array.dtype, np.floating):
        return array.astype(np.float32)
    if array.dtype == np.uint8:
        return (array.astype(np.float32) - np.float32(128)) / np.float32(128)
    if np.issubdtype(array.dtype, np.signedinteger):
        scaled: Samples = (array / -float(np.iinfo(array.dtype).min)).astype(np.float32)
        return scaled
    raise MediaError(f"is an array of {array.dtype}; samples are floats, signed integers or uint8")


def _one_channel(array: Samples) -> Samples:
    if array.ndim == 1:
        return array
    if array.ndim != 2 or min(array.shape) > MOST_CHANNELS:
        raise MediaError(
            f"is an array of shape {array.shape}; a sound is [samples], [channels, samples] or [samples, channels] "
            f"with at most {MOST_CHANNELS} channels"
        )
    mono: Samples = array.mean(axis=int(np.argmin(array.shape)), dtype=np.float32)
    return mono


def _decode(
    source: Path | bytes, max_seconds: float, reason: str, rate: int | None = None
) -> tuple[Samples, int, float] | None:
    """The first sound track as PyAV reads it, at `rate` or its own, and how many seconds after the picture it begins;
    None when there is none."""
    try:
        import av
    except ImportError as error:
        raise MediaError(f"cannot be read as a sound: {reason}; PyAV reads more: pip install av") from error
    try:
        with av.open(str(source) if isinstance(source, Path) else io.BytesIO(source), mode="r") as container:
            if not container.streams.audio:
                return None
            rate = rate or container.streams.audio[0].rate
            resampler = av.AudioResampler(format="fltp", rate=rate)
            pieces: list[Samples] = []
            length, late = 0, None
            for frame in itertools.chain(container.decode(audio=0), [None]):
                late = _lateness(container, frame) if late is None else late
                for part in resampler.resample(frame):
                    pieces.append(part.to_ndarray().mean(axis=0))
                    length += len(pieces[-1])
                _check_length(length / rate, max_seconds)
    except (av.FFmpegError, OSError, ValueError) as error:
        raise MediaError(f"cannot be read as a sound: {error}") from error
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.float32), rate, late or 0.0


def _lateness(container: Any, frame: Any) -> float:
    """Seconds from the first frame of the picture to a frame of sound; 0 where the file does not say."""
    picture = next(iter(container.streams.video), None)
    if frame is None or frame.time is None or picture is None or picture.start_time is None:
        return 0.0
    return float(frame.time - picture.start_time * picture.time_base)
