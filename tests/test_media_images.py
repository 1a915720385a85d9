"""Pillow images, arrays and files of every kind as RGB pixels."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from numpy.typing import NDArray

from relax_gym.errors import MediaError
from relax_gym.media.images import image_of, read_image

RED, WHITE = [255, 0, 0], [255, 255, 255]
CORNER: NDArray[np.uint8] = np.array([[RED, WHITE, WHITE], [WHITE, WHITE, WHITE]], dtype=np.uint8)
LIMITS: dict[str, Any] = {"max_pixels": 10_000, "resize_pixels": None}


def encoded(picture: PIL.Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def pixels(source: bytes) -> list[Any]:
    return read_image(source, **LIMITS).pixels.tolist()


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(CORNER, id="uint8"),
        pytest.param(CORNER / 255, id="float64"),
        pytest.param((CORNER / 255).astype(np.float32), id="float32"),
        pytest.param(CORNER.astype(np.int64), id="int64"),
        pytest.param(CORNER.astype(np.uint16) * 257, id="uint16"),
        pytest.param(torch.from_numpy(CORNER), id="tensor"),
        pytest.param(np.dstack([CORNER, np.full((2, 3), 255, dtype=np.uint8)]), id="opaque RGBA"),
        pytest.param(CORNER.tolist(), id="list"),
        pytest.param(PIL.Image.fromarray(CORNER), id="PIL"),
        pytest.param(PIL.Image.fromarray(CORNER).convert("P"), id="palette"),
    ],
)
def test_k68_an_image_in_memory_has_one_meaning_in_every_form(value: Any) -> None:
    image = image_of(value, **LIMITS)
    assert image.pixels.tolist() == CORNER.tolist()
    assert image == image_of(CORNER, **LIMITS)


def test_channels_may_come_first_where_only_they_can_be_the_channels() -> None:
    wide = np.concatenate([CORNER, CORNER], axis=1)
    first = torch.from_numpy(wide).permute(2, 0, 1)
    for value in (first, first.float() / 255, wide.transpose(2, 0, 1)):
        assert image_of(value, **LIMITS).pixels.tolist() == wide.tolist()


@pytest.mark.parametrize(
    ("value", "grey"),
    [
        pytest.param(np.array([[0, 51]], dtype=np.uint8), [0, 51], id="grey"),
        pytest.param(np.array([[[0], [51]]], dtype=np.uint8), [0, 51], id="one channel"),
        pytest.param(np.array([[False, True]]), [0, 255], id="bool"),
        pytest.param(PIL.Image.fromarray(np.array([[0, 65535]], dtype=np.uint16)), [0, 255], id="16-bit PIL"),
        pytest.param(PIL.Image.fromarray(np.array([[0, 255]], dtype=np.uint16)), [0, 0], id="dark 16-bit PIL"),
    ],
)
def test_grey_becomes_rgb(value: Any, grey: list[int]) -> None:
    assert image_of(value, **LIMITS).pixels.tolist() == [[[level] * 3 for level in grey]]


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (np.zeros((0, 4, 3), dtype=np.uint8), r"shape \(0, 4, 3\)"),
        (np.zeros((5, 5, 2), dtype=np.uint8), r"shape \(5, 5, 2\)"),
        (np.full((2, 2), 300), r"values from 300 to 300; pixels of int64 are in \[0, 255\]"),
        (np.full((2, 2), 2.0), r"pixels of float64 are in \[0, 1\]"),
        (np.full((2, 2), np.nan), r"values from nan to nan"),
        (np.array([["a"]]), "pixels are numbers"),
        (object(), "is a object"),
        (np.zeros((200, 51), dtype=np.uint8), r"51 x 200 pixels, media.max_pixels = 10000"),
    ],
)
def test_what_is_no_image_is_refused(value: Any, why: str) -> None:
    with pytest.raises(MediaError, match=why):
        image_of(value, **LIMITS)


def test_files_of_every_kind() -> None:
    picture = PIL.Image.fromarray(CORNER)
    assert (
        pixels(encoded(picture))
        == pixels(encoded(picture, "BMP"))
        == pixels(encoded(picture, "GIF"))
        == CORNER.tolist()
    )
    assert pixels(encoded(picture.convert("CMYK"), "TIFF")) == CORNER.tolist()
    jpeg = np.array(pixels(encoded(picture.resize((30, 20), 0), "JPEG", quality=95)))
    assert abs(jpeg[2, 2] - RED).max() < 12


def test_a_picture_is_turned_upright_as_its_exif_says() -> None:
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise
    turned = pixels(encoded(PIL.Image.fromarray(CORNER), exif=exif))
    assert turned == [[WHITE, RED], [WHITE, WHITE], [WHITE, WHITE]]


def test_transparency_shows_white() -> None:
    rgba = PIL.Image.new("RGBA", (2, 1), (0, 0, 255, 0))
    rgba.putpixel((1, 0), (0, 0, 0, 255))
    assert pixels(encoded(rgba)) == [[WHITE, [0, 0, 0]]]
    palette = PIL.Image.new("P", (2, 1), 0)
    palette.putpalette([9, 9, 9, 255, 0, 0])
    palette.putpixel((1, 0), 1)
    assert pixels(encoded(palette, transparency=0)) == [[WHITE, RED]]


def test_the_first_frame_of_an_animation_is_the_image() -> None:
    frames = [PIL.Image.new("RGB", (2, 2), colour) for colour in ("red", "blue")]
    assert pixels(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])) == [[RED, RED]] * 2


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "is empty"),
        (b"no image at all", "cannot be read as an image"),
        (
            encoded(PIL.Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 90, 3), dtype=np.uint8)))[:9000],
            "truncated",
        ),
        (encoded(PIL.Image.new("1", (10_000, 9_000))), "has 10000 x 9000 pixels, media.max_pixels = 10000"),
    ],
)
def test_k64_broken_and_absurd_files_are_refused(data: bytes, why: str) -> None:
    with pytest.raises(MediaError, match=why):
        read_image(data, **LIMITS)


def test_large_images_are_scaled_down_in_proportion(tmp_path: Path) -> None:
    file = tmp_path / "wide.png"
    PIL.Image.new("RGB", (80, 20), "red").save(file)
    assert read_image(file, max_pixels=10_000, resize_pixels=400).pixels.shape == (10, 40, 3)
    assert read_image(file, max_pixels=10_000, resize_pixels=1600).pixels.shape == (20, 80, 3)
