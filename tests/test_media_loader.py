"""MediaLoader: every form of every kind, workers that hang or die, and one object for equal content."""

from __future__ import annotations

import asyncio
import base64
import gc
import http.server
import io
import os
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import PIL.Image
import pytest
import soundfile
from slow_decoders import counting, misbehaving

from relax_gym.config import MediaConfig
from relax_gym.errors import MediaError
from relax_gym.media import Audio, Image, Media, Video
from relax_gym.media.loader import MediaLoader
from relax_gym.types import Message

T = TypeVar("T")
PIXELS = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
SAMPLES = np.random.default_rng(0).uniform(-0.9, 0.9, 400).astype(np.float32)
RATE = 4000


def png(pixels: Any = PIXELS) -> bytes:
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def wav() -> bytes:
    file = io.BytesIO()
    soundfile.write(file, SAMPLES, RATE, format="WAV", subtype="FLOAT")
    return file.getvalue()


def using(use: Callable[[MediaLoader], Awaitable[T]], config: MediaConfig | None = None, **options: Any) -> T:
    """What `use` makes of a loader, which is closed afterwards."""

    async def main() -> T:
        loader = MediaLoader(config, **options)
        try:
            return await use(loader)
        finally:
            loader.close()

    return asyncio.run(main())


def message(*parts: dict[str, Any]) -> Message:
    return {"role": "user", "content": list(parts)}


def part(kind: str, value: Any, **more: Any) -> dict[str, Any]:
    return {"type": kind, kind: value, **more}


async def items(loader: MediaLoader, *parts: dict[str, Any]) -> list[Media]:
    (loaded,) = await loader.load([message(*parts)])
    return [entry[entry["type"]] for entry in loaded["content"]]


def load(*parts: dict[str, Any], config: MediaConfig | None = None, **options: Any) -> list[Media]:
    return using(lambda loader: items(loader, *parts), config, **options)


class _Server(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path.startswith("/missing"):
            self.send_error(404)
            return
        self.send_response(200)
        self.end_headers()
        if self.path.startswith("/endless"):
            for _ in range(10_000):
                self.wfile.write(bytes(2**16))
        elif self.path.startswith("/slow"):
            time.sleep(30)
        else:
            self.wfile.write(png())

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def address() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


# Forms ---------------------------------------------------------------------------------------------------------------


def test_k68_every_form_of_an_image_is_the_same_image(tmp_path: Path, address: str) -> None:
    file = tmp_path / "it is.png"
    file.write_bytes(png())
    encoded = base64.b64encode(png()).decode()
    forms = [
        PIXELS, PIL.Image.fromarray(PIXELS), str(file), file, file.as_uri(), f"{address}/a.png?key=secret", png(),
        bytearray(png()), memoryview(png()), io.BytesIO(png()), f"data:image/png;base64,{encoded}",
        {"bytes": png(), "path": None}, {"bytes": None, "path": str(file)}, {"path": str(file)}, {"url": str(file)},
        Image(pixels=PIXELS.copy()),
    ]  # fmt: skip
    loaded = load(*(part("image", form) for form in forms))
    assert [item.digest for item in loaded] == [Image(pixels=PIXELS.copy()).digest] * len(forms)
    assert len({id(item) for item in loaded}) == 1


def test_k68_every_form_of_a_sound_is_the_same_sound(tmp_path: Path) -> None:
    file = tmp_path / "a.wav"
    file.write_bytes(wav())
    forms = [
        part("audio", (SAMPLES, RATE)),
        part("audio", {"array": SAMPLES, "sampling_rate": RATE}),
        part("audio", SAMPLES, sampling_rate=RATE),
        part("audio", str(file)),
        part("audio", wav()),
        part("audio", {"bytes": wav(), "path": "a.wav"}),
        part("audio", Audio(samples=SAMPLES.copy(), rate=RATE)),
    ]
    loaded = load(*forms)
    assert [item.digest for item in loaded] == [Audio(samples=SAMPLES.copy(), rate=RATE).digest] * len(forms)


def test_k68_every_form_of_frames_is_the_same_video() -> None:
    frames = [PIXELS, PIXELS // 2, PIXELS // 3]
    forms = [
        part("video", frames, fps=2),
        part("video", np.stack(frames), fps=2.0),
        part("video", (frames, 2)),
        part("video", {"frames": [PIL.Image.fromarray(frame) for frame in frames], "fps": 2}),
    ]
    loaded = load(*forms)
    assert len({item.digest for item in loaded}) == 1
    video = loaded[0]
    assert isinstance(video, Video)
    assert (video.frames.tolist(), video.fps, video.duration) == (np.stack(frames).tolist(), 2.0, 1.5)


def test_an_env_that_gives_frames_has_chosen_them() -> None:
    frames = [np.full((4, 4, 3), shade, dtype=np.uint8) for shade in range(8)]
    (all_of_them,) = load(part("video", frames, fps=8), config=MediaConfig(video_fps=1))
    assert isinstance(all_of_them, Video)
    assert all_of_them.indices.tolist() == list(range(8))
    (fewer,) = load(part("video", frames, fps=8), config=MediaConfig(video_max_frames=4))
    assert isinstance(fewer, Video)
    assert len(fewer.frames) == 4


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (part("image", "nowhere.png"), r"^image: nowhere.png: No such file or directory; give a path, URL, data URI"),
        (part("image", b""), r"^image bytes \(0\): is empty$"),
        (part("image", b"?"), r"^image bytes \(1\): cannot be read as an image"),
        (part("image", "data:image/png;base64,????"), r"^image: data URI 'image/png;base64': "),
        (part("image", "data:image/png"), r"has no comma; a data URI is data:TYPE;base64,DATA"),
        (
            part("image", {"colour": "red"}),
            r"^image: a dict with keys \['colour'\]; give bytes, path, url, array or frames",
        ),
        (part("image", object()), r"^image a object: is a object, which is no array of numbers"),
        (part("image", Audio(samples=SAMPLES.copy(), rate=RATE)), r"^image a Audio: is <audio 0.10 s at 4000 Hz"),
        (part("audio", SAMPLES), r"^audio a ndarray of shape \(400,\): is an array without a rate"),
        (part("video", [PIXELS]), r"^video a list: is frames without a rate"),
        (part("video", 3, fps=1), r"^video a int: is a int; frames are a list of images"),
    ],
)
def test_a_media_error_names_its_source(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(MediaError, match=why):
        load({"type": "text", "text": "look"}, wrong)


# Messages ------------------------------------------------------------------------------------------------------------


def test_k56_parts_keep_their_order_and_messages_are_not_changed() -> None:
    text = {"type": "text", "text": "and"}
    given = [
        message(part("image", PIXELS), text, part("audio", (SAMPLES, RATE)), part("image", PIXELS // 2)),
        {"role": "system", "content": "plain"},
        {"role": "tool", "content": [part("image", PIXELS // 4)]},
    ]
    before = [dict(entry) for entry in given]
    first, second, third = using(lambda loader: loader.load(given))
    assert [entry["type"] for entry in first["content"]] == ["image", "text", "audio", "image"]
    assert first["content"][1] is text
    assert (first["content"][0]["image"].pixels == PIXELS).all()
    assert (first["content"][3]["image"].pixels == PIXELS // 2).all()
    assert second is given[1]
    assert (third["role"], (third["content"][0]["image"].pixels == PIXELS // 4).all()) == ("tool", True)
    assert given == before
    assert given[0]["content"][0]["image"] is PIXELS


def test_k46_what_was_loaded_does_not_change_with_the_buffer_of_the_env() -> None:
    buffer, samples = PIXELS.copy(), SAMPLES.copy()
    image, audio, video = load(
        part("image", buffer), part("audio", (samples, RATE)), part("video", [buffer, buffer], fps=1)
    )
    buffer[:], samples[:] = 0, 0
    assert isinstance(image, Image)
    assert isinstance(audio, Audio)
    assert isinstance(video, Video)
    assert (image.pixels == PIXELS).all()
    assert (audio.samples == SAMPLES).all()
    assert (video.frames == PIXELS).all()
    with pytest.raises(ValueError, match="read-only"):
        image.pixels[:] = 0


# Sharing -------------------------------------------------------------------------------------------------------------


def decoded(file: Path) -> int:
    return len(Path(f"{file}.log").read_text().splitlines())


def test_k57_episodes_that_ask_together_decode_once_and_share_one_object(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(png())

    async def use(loader: MediaLoader) -> list[Media]:
        together = await asyncio.gather(*(items(loader, part("image", file)) for _ in range(8)))
        again = await items(loader, part("image", str(file)))
        return [*(item for found in together for item in found), *again]

    loaded = using(use, decode=counting)
    assert len({id(item) for item in loaded}) == 1
    assert decoded(file) == 1


def test_a_file_that_has_changed_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "a.png"

    async def use(loader: MediaLoader) -> tuple[Media, Media]:
        file.write_bytes(png())
        (before,) = await items(loader, part("image", file))
        file.write_bytes(png(PIXELS // 2))
        (after,) = await items(loader, part("image", file))
        return before, after

    before, after = using(use, decode=counting)
    assert before != after
    assert decoded(file) == 2


def test_k66_the_loader_keeps_nothing_that_nobody_has() -> None:
    async def use(loader: MediaLoader) -> list[weakref.ref[Media]]:
        loaded = await items(loader, part("image", png()), part("image", PIXELS // 2))
        references = [weakref.ref(item) for item in loaded]
        del loaded
        await asyncio.sleep(0)
        gc.collect()
        return references

    assert [reference() for reference in using(use)] == [None, None]


# Workers -------------------------------------------------------------------------------------------------------------


def children() -> set[int]:
    """Running processes of this one, but for the one that counts semaphores."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, rest = stat.read_text().split(" (", 1)
            command = (stat.parent / "cmdline").read_bytes()
        except OSError:
            continue
        state, parent = rest.rsplit(") ", 1)[1].split()[:2]
        if int(parent) == os.getpid() and state != "Z" and b"resource_tracker" not in command:
            found.add(int(pid))
    return found


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (b"hang", r"took longer than media.timeout = 6 s to read"),
        (b"crash", r"made its decoder crash \(exit code 11\)"),
    ],
)
def test_k65_a_decoder_that_hangs_or_dies_takes_only_its_own_item_with_it(bad: bytes, why: str) -> None:
    before = children()

    async def use(loader: MediaLoader) -> list[Any]:
        jobs = [items(loader, part("image", data)) for data in (png(), bad, png(PIXELS // 2))]
        together = await asyncio.gather(*jobs, return_exceptions=True)
        return [*together, await items(loader, part("image", png(PIXELS // 3)))]

    first, failed, second, later = using(use, MediaConfig(timeout=6, workers=1), decode=misbehaving)
    assert [len(found) for found in (first, second, later)] == [1, 1, 1]
    assert isinstance(failed, MediaError)
    with pytest.raises(MediaError, match=why):
        raise failed
    assert children() == before


def test_k67_decoding_happens_in_other_processes(tmp_path: Path) -> None:
    files = [tmp_path / f"{number}.png" for number in range(4)]
    for number, file in enumerate(files):
        file.write_bytes(png(PIXELS // (number + 1)))
    load(*(part("image", file) for file in files), decode=counting)
    pids = {int(line) for file in files for line in Path(f"{file}.log").read_text().splitlines()}
    assert os.getpid() not in pids
    assert len(pids) == 2


# Addresses -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/missing.png?key=secret", r"/missing.png: cannot be downloaded: Not Found$"),
        ("/endless.png", r"/endless.png: is larger than media.max_bytes = 1000000$"),
        ("/slow.png", r"/slow.png: took longer than media.timeout = 4 s to read$|cannot be downloaded: timed out$"),
    ],
)
def test_downloads_end_at_their_limits(address: str, path: str, why: str) -> None:
    with pytest.raises(MediaError, match=why) as raised:
        load(part("image", address + path), config=MediaConfig(timeout=4, max_bytes=1_000_000))
    assert "secret" not in str(raised.value)


def test_an_address_that_nobody_listens_at() -> None:
    with pytest.raises(MediaError, match=r"^image http://127.0.0.1/a.png: cannot be downloaded: "):
        load(part("image", "http://127.0.0.1:9/a.png"))
