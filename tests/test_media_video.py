"""Which frames of a video are taken, by every decoder that is installed."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from relax_gym.errors import MediaError
from relax_gym.media.containers import missing_bytes
from relax_gym.media.decoders import DECODERS, Decoder, Unavailable
from relax_gym.media.items import Video
from relax_gym.media.video import VideoPlan, choose_frames, read_video, video_of_frames

WIDTH, HEIGHT = 64, 48
CLOCK = Fraction(1, 1000)


def plan(**changes: Any) -> VideoPlan:
    return VideoPlan(**{"fps": 2.0, "min_frames": 1, "max_frames": 32, "max_pixels": 10**6, **changes})


def clip(
    file: Path,
    stamps: Sequence[int],
    *,
    codec: str = "libx264",
    gop: int = 250,
    sound: bool = False,
    sound_from: int = 0,
    options: dict[str, str] | None = None,
) -> Path:
    """Frames shown at `stamps` milliseconds, each one's number in its shade (4 a step), and perhaps a 440 Hz tone."""
    with av.open(str(file), "w", options=options or {}) as container:
        stream: Any = container.add_stream(codec, rate=25)
        stream.width, stream.height, stream.pix_fmt, stream.time_base = WIDTH, HEIGHT, "yuv420p", CLOCK
        stream.codec_context.time_base, stream.codec_context.gop_size = CLOCK, gop
        voice: Any = container.add_stream("aac", rate=16_000) if sound else None
        for number, stamp in enumerate(stamps):
            shade = np.full((HEIGHT, WIDTH, 3), 4 * (number % 64), dtype=np.uint8)
            frame: Any = av.VideoFrame.from_ndarray(shade, format="rgb24")
            frame.pts, frame.time_base = stamp, CLOCK
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
        if sound:
            tone = np.sin(2 * np.pi * 440 * np.arange(16_000) / 16_000).astype(np.float32)
            wave: Any = av.AudioFrame.from_ndarray(tone[None], format="fltp", layout="mono")
            wave.sample_rate, wave.pts, wave.time_base = 16_000, sound_from * 16, Fraction(1, 16_000)
            container.mux([*voice.encode(wave), *voice.encode(None)])
    return file


def steady(count: int, fps: float = 25.0) -> list[int]:
    return [round(number * 1000 / fps) for number in range(count)]


def numbers(video: Video) -> list[int]:
    """The numbers that the frames carry."""
    return [round(float(frame.mean()) / 4) for frame in video.frames]


@pytest.fixture(params=sorted(DECODERS))
def decoder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    try:
        DECODERS[request.param](clip(tmp_path / "probe.mp4", steady(2))).close()
    except Unavailable as error:
        pytest.skip(str(error))
    return str(request.param)


# The plan ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frames", "fps", "wanted", "chosen"),
    [
        (100, 10.0, plan(fps=1.0), [0, 10, 20, 30, 40, 50, 60, 70, 80, 90]),
        (100, 10.0, plan(fps=1.0, max_frames=4), [0, 25, 50, 75]),
        (100, 10.0, plan(fps=0.01), [0]),
        (100, 10.0, plan(fps=0.01, min_frames=2), [0, 50]),
        (5, 10.0, plan(fps=2.0, min_frames=8), [0, 1, 2, 3, 4]),
        (5, 10.0, plan(fps=100.0), [0, 1, 2, 3, 4]),
        (3, 10.0, plan(fps=10.0, max_frames=2), [0, 1]),
        (1, 10.0, plan(), [0]),
    ],
)
def test_frames_are_spread_evenly_from_the_first_on(
    frames: int, fps: float, wanted: VideoPlan, chosen: list[int]
) -> None:
    assert choose_frames(np.arange(frames) / fps, frames / fps, wanted).tolist() == chosen


def test_a_long_pause_does_not_cost_the_least_number_of_frames() -> None:
    times = np.array([0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 60.0])
    assert choose_frames(times, 61.0, plan(fps=0.1)).tolist() == [0, 6]
    assert choose_frames(times, 61.0, plan(fps=0.1, min_frames=4)).tolist() == [0, 2, 4, 6]


def test_the_frame_of_a_moment_is_the_one_shown_then() -> None:
    times = np.array([0.0, 0.1, 0.2, 3.0, 3.9])
    assert choose_frames(times, 4.0, plan(fps=1.0)).tolist() == [0, 2, 3]
    assert choose_frames(times + 7.5, 4.0, plan(fps=1.0)).tolist() == [0, 2, 3]


def test_k64_clips_of_one_to_eight_frames() -> None:
    frames = [np.full((4, 6, 3), 4 * number, dtype=np.uint8) for number in range(8)]
    for count in range(1, 9):
        video = video_of_frames(frames[:count], 2.0, plan())
        assert numbers(video) == list(range(count))
        assert (video.times.tolist(), video.duration) == ([number / 2 for number in range(count)], count / 2)
    with pytest.raises(MediaError, match="has no frames"):
        video_of_frames([], 2.0, plan())
    with pytest.raises(MediaError, match=r"different sizes: \[\(2, 2, 3\), \(4, 6, 3\)\]"):
        video_of_frames([*frames, np.zeros((2, 2, 3), dtype=np.uint8)], 2.0, plan())


# Files ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gop", [1, 7, 250])
def test_every_decoder_takes_the_same_frames(decoder: str, gop: int, tmp_path: Path) -> None:
    file = clip(tmp_path / "a.mp4", steady(50), gop=gop)
    for source in (file, file.read_bytes()):
        video = read_video(source, plan(fps=5.0), decoders=[decoder])
        assert video.indices.tolist() == numbers(video) == list(range(0, 50, 5))
        np.testing.assert_allclose(video.times, np.arange(10) / 5, atol=1e-6)
        assert (video.total_frames, video.frames.shape[1:]) == (50, (HEIGHT, WIDTH, 3))
        assert video.duration == pytest.approx(2.0)
        assert video.audio is None


@pytest.mark.parametrize("count", range(1, 9))
def test_k64_files_of_one_to_eight_frames(decoder: str, count: int, tmp_path: Path) -> None:
    video = read_video(clip(tmp_path / "a.mp4", steady(count)), plan(min_frames=8), decoders=[decoder])
    assert numbers(video) == video.indices.tolist() == list(range(count))
    assert (video.total_frames, video.fps) == (count, pytest.approx(25.0, rel=0.02))


def test_k58_a_variable_frame_rate_keeps_its_times(decoder: str, tmp_path: Path) -> None:
    file = clip(tmp_path / "a.mkv", [0, 100, 200, 3000, 3900, 4000], gop=3)
    if decoder == "torchcodec":
        with pytest.raises(MediaError, match="variable frame rate"):
            read_video(file, plan(fps=1.0), decoders=[decoder])
        return
    video = read_video(file, plan(fps=1.0), decoders=[decoder])
    assert numbers(video) == video.indices.tolist() == [0, 2, 3]
    np.testing.assert_allclose(video.times, [0.0, 0.2, 3.0], atol=2e-3)


@pytest.mark.parametrize(
    ("suffix", "codec"),
    [("ts", "libx264"), ("avi", "mpeg4"), ("webm", "libvpx"), ("mov", "libx264")],
)
def test_every_container_is_sought_in_exactly(suffix: str, codec: str, tmp_path: Path) -> None:
    """Some go to a later key frame than they are asked for."""
    file = clip(tmp_path / f"a.{suffix}", steady(60), codec=codec, gop=12)
    with av.open(str(file)) as container:
        every = [round(float(frame.to_ndarray(format="rgb24").mean()) / 4) for frame in container.decode(video=0)]
    for fps in (25.0, 2.5, 1.0):
        video = read_video(file, plan(fps=fps, max_frames=60), decoders=["av"])
        assert numbers(video) == [every[index] for index in video.indices]
    assert (video.total_frames, video.indices.tolist()) == (60, [0, 30])


def test_decord_is_kept_from_containers_that_it_reads_wrongly(tmp_path: Path) -> None:
    pytest.importorskip("decord")
    with pytest.raises(MediaError, match="decord reads only MP4 and Matroska rightly"):
        read_video(clip(tmp_path / "a.ts", steady(10)), plan(), decoders=["decord"])


def test_a_video_is_turned_upright(decoder: str, tmp_path: Path) -> None:
    """Of a frame that is dark on its left and to be turned clockwise, the top is dark."""
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        stream: Any = container.add_stream("libx264", rate=25)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        picture = np.zeros((HEIGHT, WIDTH, 3), dtype=np.uint8)
        picture[:, WIDTH // 2 :] = (220, 120, 20)
        container.mux([*stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")), *stream.encode(None)])
    data = bytearray((tmp_path / "a.mp4").read_bytes())
    matrix = data.index(b"tkhd") + 44  # of the display, 9 numbers
    struct.pack_into(">9i", data, matrix, 0, 1 << 16, 0, -1 << 16, 0, 0, HEIGHT << 16, 0, 1 << 30)
    for pixels, height, width in ((None, WIDTH, HEIGHT), (WIDTH * HEIGHT // 4, WIDTH // 2, HEIGHT // 2)):
        frames = read_video(bytes(data), plan(resize_pixels=pixels), decoders=[decoder]).frames
        assert frames.shape == (1, height, width, 3)
        assert frames[0, : height // 3].mean() < 10
        np.testing.assert_allclose(frames[0, -height // 3 :].mean((0, 1)), (220, 120, 20), atol=15)


def test_frames_are_scaled_down_in_proportion(decoder: str, tmp_path: Path) -> None:
    file = clip(tmp_path / "a.mp4", steady(10))
    video = read_video(file, plan(resize_pixels=WIDTH * HEIGHT // 4), decoders=[decoder])
    assert video.frames.shape == (1, HEIGHT // 2, WIDTH // 2, 3)
    with pytest.raises(MediaError, match=r"has 64 x 48 pixels, media.max_pixels = 3000"):
        read_video(file, plan(max_pixels=3000), decoders=[decoder])


@pytest.mark.parametrize("width", [16, 32, 40, 48, 96, 100])
def test_pixels_are_where_they_belong_whatever_the_width(decoder: str, width: int, tmp_path: Path) -> None:
    """FFmpeg pads the rows of some widths, and of which depends on the processor."""
    height = width // 4 * 2
    rows, columns = np.mgrid[:height, :width] * 220 // width
    picture = np.stack([columns, rows, (rows + columns) // 2], -1).astype(np.uint8)
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        stream: Any = container.add_stream("libx264", rate=25, options={"crf": "1"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        container.mux([*stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")), *stream.encode(None)])
    (frame,) = read_video(tmp_path / "a.mp4", plan(), decoders=[decoder]).frames
    assert frame.shape == picture.shape
    assert np.abs(frame.astype(int) - picture).mean() < 6


def test_the_sound_track_comes_with_the_frames(tmp_path: Path) -> None:
    file = clip(tmp_path / "a.mp4", steady(25), sound=True)
    video = read_video(file, plan(sound_rate=8000))
    assert video.audio is not None
    assert video.audio.rate == 8000
    assert video.audio.seconds == pytest.approx(1.0, abs=0.15)
    spectrum = np.abs(np.fft.rfft(video.audio.samples[:8000]))
    assert spectrum.argmax() == pytest.approx(440, abs=3)
    silent = clip(tmp_path / "silent.mp4", steady(25))
    assert read_video(silent, plan(sound_rate=8000)).audio is None
    with pytest.raises(MediaError, match=r"media.audio_max_seconds = 0.5"):
        read_video(file, plan(sound_rate=8000, max_seconds=0.5))


@pytest.mark.parametrize("suffix", ["mp4", "mkv"])
@pytest.mark.parametrize(("picture", "sound"), [(0, 600), (600, 0), (500, 500)])
def test_sound_is_heard_when_its_frames_are_seen(suffix: str, picture: int, sound: int, tmp_path: Path) -> None:
    stamps = [picture + stamp for stamp in steady(50)]
    file = clip(tmp_path / f"a.{suffix}", stamps, sound=True, sound_from=sound)
    track = read_video(file, plan(sound_rate=8000)).audio
    assert track is not None
    loud = np.flatnonzero(np.abs(track.samples) > 0.1) / 8000
    assert loud[0] == pytest.approx(max(0, sound - picture) / 1000, abs=0.07)
    assert loud[-1] == pytest.approx((sound - picture) / 1000 + 1, abs=0.07)


def test_sound_that_begins_too_late_is_too_long(tmp_path: Path) -> None:
    file = clip(tmp_path / "a.mkv", steady(25), sound=True, sound_from=10**8)
    with pytest.raises(MediaError, match=r"media.audio_max_seconds = 600"):
        read_video(file, plan(sound_rate=8000))


def broken(tmp_path: Path) -> dict[str, bytes]:
    whole = clip(tmp_path / "whole.mp4", steady(50)).read_bytes()
    with av.open(str(tmp_path / "sound.mp4"), "w") as container:
        voice: Any = container.add_stream("aac", rate=16_000)
        wave: Any = av.AudioFrame.from_ndarray(np.zeros((1, 16_000), dtype=np.float32), format="fltp", layout="mono")
        wave.sample_rate = 16_000
        container.mux([*voice.encode(wave), *voice.encode(None)])
    noise = np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8).tobytes()
    sound = (tmp_path / "sound.mp4").read_bytes()
    return {
        "text": b"no video at all" * 99,
        "noise": noise,
        "half": whole[: len(whole) // 2],
        "sound": sound,
        "empty": b"",
    }


@pytest.mark.parametrize("fault", ["text", "noise", "half", "sound", "empty"])
def test_k64_broken_files_are_refused(decoder: str, fault: str, tmp_path: Path) -> None:
    data = broken(tmp_path)[fault]
    file = tmp_path / "broken.mp4"
    file.write_bytes(data)
    with pytest.raises(MediaError):
        read_video(data, plan(), decoders=[decoder])
    with pytest.raises(MediaError):
        read_video(file, plan(), decoders=[decoder])


@pytest.mark.parametrize("suffix", ["mp4", "mov", "mkv", "webm", "avi"])
@pytest.mark.parametrize("part", [0.3, 0.6, 0.95])
def test_k64_a_file_that_was_cut_off_is_refused(suffix: str, part: float, tmp_path: Path) -> None:
    codec = {"webm": "libvpx", "avi": "mpeg4"}.get(suffix, "libx264")
    whole = clip(
        tmp_path / f"a.{suffix}", steady(60), codec=codec, gop=5, options={"movflags": "faststart"}
    ).read_bytes()
    (tmp_path / "half").write_bytes(half := whole[: int(len(whole) * part)])
    assert missing_bytes(whole) == missing_bytes(whole + b"some more") == 0
    for source in (half, tmp_path / "half"):
        assert missing_bytes(source) > 0
        with pytest.raises(MediaError, match=r"was cut off: its last [\d,]+ bytes are missing"):
            read_video(source, plan())


def test_a_stream_that_was_cut_off_gives_what_is_there(tmp_path: Path) -> None:
    whole = clip(tmp_path / "a.ts", steady(60), gop=5).read_bytes()
    video = read_video(whole[: len(whole) // 2], plan(fps=5.0))
    assert 5 <= video.total_frames < 60
    assert numbers(video) == video.indices.tolist()
    assert video.duration == pytest.approx(video.total_frames / 25, abs=0.1)


@pytest.mark.parametrize("damage", ["noise", "zeros"])
@pytest.mark.parametrize("start", [0.0, 0.5])
def test_k65_damaged_frames_are_refused(decoder: str, damage: str, start: float, tmp_path: Path) -> None:
    whole = clip(tmp_path / "a.mp4", steady(60), gop=60, options={"movflags": "faststart"}).read_bytes()
    begin = whole.index(b"mdat") + 4
    begin += int(start * (len(whole) - begin))
    noise = np.random.default_rng(0).integers(0, 256, len(whole) - begin, dtype=np.uint8).tobytes()
    with pytest.raises(MediaError):
        read_video(whole[:begin] + (noise if damage == "noise" else bytes(len(noise))), plan(), decoders=[decoder])


def test_a_playlist_is_not_followed(tmp_path: Path) -> None:
    clip(tmp_path / "a.ts", steady(10))
    (tmp_path / "a.m3u8").write_text("#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:0.4,\na.ts\n#EXT-X-ENDLIST\n")
    with pytest.raises(MediaError, match="cannot be read as a video"):
        read_video(tmp_path / "a.m3u8", plan(), decoders=["av"])


def test_a_decoder_that_does_not_work_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def old(source: Path | bytes) -> Decoder:
        raise AttributeError("no attribute of that name in this version")

    monkeypatch.setitem(DECODERS, "old", old)
    file = clip(tmp_path / "a.mp4", steady(5))
    for _ in range(2):
        assert numbers(read_video(file, plan(fps=25.0), decoders=["old", "av"])) == [0, 1, 2, 3, 4]
    assert [record.getMessage() for record in caplog.records] == [
        "cannot decode videos with old: no attribute of that name in this version"
    ]


def test_without_a_decoder_the_message_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(MediaError, match=r"needs a video decoder: pip install 'relax-gym\[media\]'"):
        read_video(clip(tmp_path / "a.mp4", steady(2)), plan(), decoders=[])
