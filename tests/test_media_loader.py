"""MediaLoader: every form of every kind, order, and one object for equal content."""

from __future__ import annotations

import asyncio
import base64
import gc
import io
import os
import weakref
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import PIL.Image
import pytest
import torch
from loader_kit import PIXELS, RATE, SAMPLES, decoded, items, load, message, part, png, serving, using, wav
from slow_decoders import counting

from relax_gym.config import MediaConfig
from relax_gym.errors import MediaError
from relax_gym.media import Audio, Image, Media, Video
from relax_gym.media.loader import MediaLoader

# Forms ---------------------------------------------------------------------------------------------------------------


class Place(os.PathLike[str]):
    """A path that is no Path."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __fspath__(self) -> str:
        return str(self._path)


def after_writing(data: bytes) -> io.BytesIO:
    """A file as whoever wrote it leaves it."""
    file = io.BytesIO()
    file.write(data)
    return file


def test_k68_every_form_of_an_image_is_the_same_image(tmp_path: Path) -> None:
    file = tmp_path / "it is.png"
    file.write_bytes(png())
    encoded = base64.b64encode(png()).decode()
    forms = [
        PIXELS, PIXELS / 255, torch.from_numpy(PIXELS), PIXELS.tolist(), PIL.Image.fromarray(PIXELS),
        str(file), file, Place(file), file.as_uri(), png(), bytearray(png()), memoryview(png()),
        io.BytesIO(png()), after_writing(png()), PIL.Image.open(io.BytesIO(png())),
        f"data:image/png;base64,{encoded}", f"data:image/png;BASE64,{encoded[:40]}\n{encoded[40:]}",
        f"data:image/png;base64,{quote(encoded)}", f"data:image/png,{quote(png())}",
        {"bytes": png(), "path": None}, {"bytes": None, "path": str(file)}, {"path": str(file)}, {"url": str(file)},
        Image(pixels=PIXELS.copy()),
    ]  # fmt: skip
    with serving() as address:
        forms += [f"{address}/a.png?key=secret", f"{address}/with a blank.png", {"url": f"{address}/ä.png"}]
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
        part("audio", (torch.from_numpy(SAMPLES), np.int64(RATE))),
        part("audio", {"array": SAMPLES.tolist()}, sampling_rate=float(RATE)),
        part("audio", {"path": None, "array": SAMPLES, "sampling_rate": np.int32(RATE)}),
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
        part("video", (torch.from_numpy(np.stack(frames)), np.int64(2))),
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
        (part("video", [PIXELS], fps=-1), r"^video: has fps = -1; it must be a positive number$"),
        (part("video", ([PIXELS], float("nan"))), r"^video a list: has fps = nan; it must be a positive number$"),
        (part("video", b"?", max_frames=1.5), r"^video: has max_frames = 1.5; it must be a positive whole number$"),
        (part("image", None), r"^image: the part has nothing under its key 'image'; give a path"),
        ({"type": "image"}, r"^image: the part has nothing under its key 'image'"),
        (part("image_url", "a.png"), r"^image_url: is no type of a part; give text, image, video, audio$"),
        (part("image", "~nobody-here/a.png"), r"^image: ~nobody-here/a.png: Could not determine home directory"),
        (part("image", "http://[bad/a.png?key=secret"), r"^image: a URL of 28 characters that is malformed$"),
        (part("image", "data:image/png;base64,é"), r"^image: data URI 'image/png;base64': Only base64 data"),
        (part("image", PIL.Image.open(io.BytesIO(png()[:60]))), r"^image a PngImageFile: cannot be read: OSError: "),
        (part("image", io.FileIO("/dev/null", "w")), r"^image: a FileIO that cannot be read: File not open for read"),
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


def test_k46_what_a_worker_decoded_is_read_only_too() -> None:
    image, audio = load(part("image", png()), part("audio", wav()))
    assert isinstance(image, Image)
    assert isinstance(audio, Audio)
    assert not image.pixels.flags.writeable
    assert not audio.samples.flags.writeable


def test_a_file_that_episodes_share_is_read_by_each_and_left_where_it_was() -> None:
    file = io.BytesIO(png())
    file.seek(5)

    async def use(loader: MediaLoader) -> list[list[Media]]:
        return await asyncio.gather(*(items(loader, part("image", file)) for _ in range(8)))

    assert len({item.digest for (item,) in using(use)}) == 1
    assert file.tell() == 5


def test_a_picture_that_pillow_has_not_read_yet_may_be_shared_by_episodes() -> None:
    large = np.random.default_rng(0).integers(0, 256, (700, 700, 3), dtype=np.uint8)
    picture = PIL.Image.open(io.BytesIO(png(large)))

    async def use(loader: MediaLoader) -> list[list[Media]]:
        return await asyncio.gather(*(items(loader, part("image", picture)) for _ in range(8)))

    loaded = using(use)
    assert [item.digest for (item,) in loaded] == [Image(pixels=large).digest] * 8


# Sharing -------------------------------------------------------------------------------------------------------------


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


def test_k57_equal_content_in_two_files_is_one_object_and_each_is_decoded_once(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.png", "b.png")]
    for file in files:
        file.write_bytes(png())

    async def use(loader: MediaLoader) -> list[Media]:
        return [(await items(loader, part("image", file)))[0] for file in (*files, *files)]

    assert len({id(item) for item in using(use, decode=counting)}) == 1
    assert [decoded(file) for file in files] == [1, 1]


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
