"""Sound files and arrays of every kind as one channel of float32."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from relax_gym.errors import MediaError
from relax_gym.media.audio import audio_of, read_audio

RATE = 8000
TONE = (0.5 * np.sin(2 * np.pi * 440 * np.arange(RATE) / RATE)).astype(np.float32)
AS_IT_IS: dict[str, Any] = {"rate": None, "max_seconds": 5.0}


def wav(samples: Any = TONE, rate: int = RATE, kind: str = "WAV", subtype: str = "FLOAT") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind, subtype=subtype)
    return file.getvalue()


def pitch(samples: np.ndarray[Any, Any], rate: int) -> float:
    return float(np.abs(np.fft.rfft(samples)).argmax() * rate / len(samples))


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(TONE, id="float32"),
        pytest.param(TONE.astype(np.float64), id="float64"),
        pytest.param(np.rint(TONE * 32768).astype(np.int16), id="int16"),
        pytest.param(np.rint(TONE.astype(np.float64) * 2**31).astype(np.int32), id="int32"),
        pytest.param(TONE[None], id="[1, n]"),
        pytest.param(TONE[:, None], id="[n, 1]"),
        pytest.param(np.stack([TONE * 1.5, TONE * 0.5]), id="stereo, channels first"),
        pytest.param(np.stack([TONE * 1.5, TONE * 0.5], axis=1), id="stereo, channels last"),
        pytest.param(torch.from_numpy(TONE), id="tensor"),
        pytest.param(TONE.tolist(), id="list"),
    ],
)
def test_k68_a_sound_in_memory_has_one_meaning_in_every_form(value: Any) -> None:
    audio = audio_of(value, RATE, **AS_IT_IS)
    assert (audio.samples.dtype, audio.rate, audio.seconds) == (np.float32, RATE, 1.0)
    np.testing.assert_allclose(audio.samples, TONE, atol=3e-5)


def test_bytes_are_centred_on_128() -> None:
    assert audio_of(np.array([0, 128, 192], dtype=np.uint8), RATE, **AS_IT_IS).samples.tolist() == [-1.0, 0.0, 0.5]


def test_k62_an_array_without_a_rate_is_refused_and_one_with_another_rate_resampled() -> None:
    with pytest.raises(MediaError, match=r"is an array without a rate; give \(samples, rate\)"):
        audio_of(TONE, None, **AS_IT_IS)
    high = np.sin(2 * np.pi * 440 * np.arange(44_100) / 44_100).astype(np.float32)
    audio = audio_of(high, 44_100, rate=16_000, max_seconds=5.0)
    assert (audio.rate, len(audio.samples)) == (16_000, 16_000)
    assert pitch(audio.samples, 16_000) == 440


@pytest.mark.parametrize(
    ("value", "rate", "why"),
    [
        (np.zeros(0, dtype=np.float32), RATE, "has no samples"),
        (np.array([0.0, np.nan]), RATE, "NaN or infinite"),
        (np.array([0.0, np.inf]), RATE, "NaN or infinite"),
        (np.zeros((20, 20)), RATE, r"shape \(20, 20\)"),
        (np.zeros(8, dtype=bool), RATE, "is an array of bool"),
        (TONE, 0, "has a rate of 0"),
        (TONE, 0.5, "has a rate of 0.5"),
        (TONE, np.inf, "has a rate of inf"),
        (TONE, "8000", "has a rate of '8000'"),
        (np.zeros(RATE * 6), RATE, r"lasts 6.0 s, media.audio_max_seconds = 5"),
    ],
)
def test_what_is_no_sound_is_refused(value: Any, rate: float, why: str) -> None:
    with pytest.raises(MediaError, match=why):
        audio_of(value, rate, **AS_IT_IS)


@pytest.mark.parametrize(
    ("kind", "subtype", "tolerance"),
    [
        ("WAV", "PCM_16", 1e-4),
        ("WAV", "PCM_U8", 1e-2),
        ("FLAC", "PCM_16", 1e-4),
        ("OGG", "VORBIS", 0.1),
        ("MP3", "MPEG_LAYER_III", 0.1),
    ],
)
def test_files_of_every_kind(kind: str, subtype: str, tolerance: float) -> None:
    audio = read_audio(wav(kind=kind, subtype=subtype), **AS_IT_IS)
    assert audio.rate == RATE
    assert pitch(audio.samples[:RATE], RATE) == pytest.approx(440, abs=2)
    if tolerance < 0.1:
        np.testing.assert_allclose(audio.samples, TONE, atol=tolerance)


def test_stereo_files_become_one_channel_at_the_rate_wanted(tmp_path: Path) -> None:
    file = tmp_path / "stereo.wav"
    file.write_bytes(wav(np.stack([TONE, np.zeros_like(TONE)], axis=1)))
    audio = read_audio(file, rate=4000, max_seconds=5.0)
    assert (audio.rate, len(audio.samples)) == (4000, 4000)
    assert np.abs(audio.samples[100:-100]).max() == pytest.approx(0.25, abs=0.01)


def test_a_sound_whose_writer_did_not_know_its_length_is_read() -> None:
    for length in (0xFFFFFFFF, 0x7FFFF024, len(wav())):
        streamed = wav()[:4] + length.to_bytes(4, "little") + wav()[8:]
        np.testing.assert_array_equal(read_audio(streamed, **AS_IT_IS).samples, TONE)


def test_surround_sound_becomes_the_mean_of_its_channels_whoever_reads_it() -> None:
    av = pytest.importorskip("av")
    channels = np.zeros((6, 48_000), dtype=np.float32)
    channels[2] = 0.6 * np.sin(2 * np.pi * 440 * np.arange(48_000) / 48_000)
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as container:
        stream = container.add_stream("aac", rate=48_000, layout="5.1", bit_rate=512_000)
        frame = av.AudioFrame.from_ndarray(channels, format="fltp", layout="5.1")
        frame.sample_rate = 48_000
        container.mux([*stream.encode(frame), *stream.encode(None)])
    for source in (file.getvalue(), wav(channels.T, rate=48_000)):
        middle = read_audio(source, **AS_IT_IS).samples[12_000:36_000]
        assert np.sqrt((middle**2).mean()) == pytest.approx(0.1 / np.sqrt(2), rel=0.05)


def test_what_soundfile_cannot_read_is_read_by_pyav(tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    file = tmp_path / "tone.mp4"
    with av.open(str(file), "w") as container:
        stream = container.add_stream("aac", rate=48_000)
        tone = (0.5 * np.sin(2 * np.pi * 440 * np.arange(48_000) / 48_000)).astype(np.float32)
        frame = av.AudioFrame.from_ndarray(tone[None], format="fltp", layout="mono")
        frame.sample_rate = 48_000
        for packet in [*stream.encode(frame), *stream.encode(None)]:
            container.mux(packet)
    audio = read_audio(file, **AS_IT_IS)
    assert audio.rate == 48_000
    assert audio.seconds == pytest.approx(1.0, abs=0.1)
    assert pitch(audio.samples[:48_000], 48_000) == pytest.approx(440, abs=2)
    with pytest.raises(MediaError, match=r"media.audio_max_seconds = 0.5"):
        read_audio(file, rate=None, max_seconds=0.5)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "is empty"),
        (b"no sound at all", "cannot be read as a sound"),
        (wav(np.zeros(0)), "has no samples"),
        (wav(np.zeros(RATE * 6)), "lasts 6.0 s"),
        (wav()[:-1000], "was cut off: its last 1,000 bytes are missing"),
        (wav(kind="FLAC", subtype="PCM_16")[:5000], "cannot be read as a sound"),
    ],
    ids=["nothing", "text", "no samples", "long", "cut WAV", "cut FLAC"],  # a file holds the time it was made
)
def test_k64_broken_and_absurd_files_are_refused(data: bytes, why: str) -> None:
    with pytest.raises(MediaError, match=why):
        read_audio(data, **AS_IT_IS)
