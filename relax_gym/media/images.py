"""Pillow images and arrays of every kind → RGB pixels."""

from __future__ import annotations

import io
import math
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
from numpy.typing import NDArray
from PIL import ImageOps

from relax_gym.errors import MediaError
from relax_gym.media.items import Image

CHANNELS = (1, 3, 4)
WHITE = (255, 255, 255, 255)
_opening = threading.Lock()


def read_image(source: Path | bytes, *, max_pixels: int, resize_pixels: int | None) -> Image:
    """The first frame of an encoded image, upright, transparency on white.

    Raises:
        MediaError: it is no image, is broken, or has more than `max_pixels`.
    """
    if source == b"":
        raise MediaError("is empty")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PIL.Image.DecompressionBombWarning)
            with PIL.Image.open(source if isinstance(source, Path) else io.BytesIO(source)) as opened:
                return image_of(opened, max_pixels=max_pixels, resize_pixels=resize_pixels)
    except MediaError:
        raise
    except Exception as error:  # a decoder raises whatever its format makes it stumble over
        raise MediaError(f"cannot be read as an image: {error}") from error


def image_of(value: Any, *, max_pixels: int, resize_pixels: int | None) -> Image:
    """A Pillow image, array [height, width(, channels)] or [channels, height, width], or tensor of one.

    Floats are in [0, 1]; bools are black and white; integers in [0, 255], or [0, 65535] when they are uint16.

    Raises:
        MediaError: it is none of these, or has more than `max_pixels`.
    """
    picture = value if isinstance(value, PIL.Image.Image) else PIL.Image.fromarray(_pixels(value))
    width, height = picture.size
    if width * height > max_pixels:
        raise MediaError(f"has {width} x {height} pixels, media.max_pixels = {max_pixels}")
    with _opening:  # Pillow reads files late, and no two threads may do it for the same picture
        picture = ImageOps.exif_transpose(picture)
    picture = _flat(picture)
    if resize_pixels is not None:
        picture = shrink(picture, resize_pixels)
    return Image(pixels=np.array(picture))


def shrink(picture: PIL.Image.Image, most: int) -> PIL.Image.Image:
    """The picture with at most so many pixels, in about its own proportions."""
    width, height = picture.size
    if width * height <= most:
        return picture
    scale = math.sqrt(most / (width * height))
    size = max(1, int(width * scale)), max(1, int(height * scale))
    return picture.resize(size, PIL.Image.Resampling.LANCZOS, reducing_gap=2.0)


def _flat(picture: PIL.Image.Image) -> PIL.Image.Image:
    """The picture in RGB, transparency on white."""
    if picture.mode.startswith("I") or picture.mode == "F":
        return _from_numbers(np.asarray(picture)).convert("RGB")
    if picture.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in picture.info:
        picture = picture.convert("RGBA")
        background = PIL.Image.new("RGBA", picture.size, WHITE)
        return PIL.Image.alpha_composite(background, picture).convert("RGB")
    return picture.convert("RGB")


def _from_numbers(grey: NDArray[Any]) -> PIL.Image.Image:
    """Grey values of 16 bits, or of a wider type, which are meant as 8 bits if they fit into them."""
    wide = grey.dtype == np.uint16 or float(grey.max(initial=0)) > 255
    return PIL.Image.fromarray((grey / (257.0 if wide else 1.0)).clip(0, 255).astype(np.uint8))


def _pixels(value: Any) -> NDArray[np.uint8]:
    array = to_array(value)
    if array.ndim == 3 and array.shape[2] not in CHANNELS and array.shape[0] in CHANNELS:
        array = array.transpose(1, 2, 0)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in CHANNELS) or not array.size:
        raise MediaError(
            f"is an array of shape {array.shape}; an image is [height, width], [height, width, channels] or "
            "[channels, height, width] with 1, 3 or 4 channels"
        )
    return np.ascontiguousarray(_bytes(array))


def _bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Values as bytes. Raises MediaError for values that cannot be meant as pixels."""
    if array.dtype == np.uint8:
        return array
    if array.dtype == np.bool_:
        return array.astype(np.uint8) * 255
    if not np.issubdtype(array.dtype, np.number):
        raise MediaError(f"is an array of {array.dtype}; pixels are numbers")
    low, high = float(array.min()), float(array.max())
    most = 65535 if array.dtype == np.uint16 else 1 if np.issubdtype(array.dtype, np.floating) else 255
    if not 0 <= low <= high <= most:
        raise MediaError(f"has values from {low:g} to {high:g}; pixels of {array.dtype} are in [0, {most}]")
    scaled: NDArray[np.uint8] = np.rint(array.astype(np.float64) * (255 / most)).astype(np.uint8)
    return scaled


def to_array(value: Any) -> NDArray[Any]:
    """A tensor or anything array-like as an array. Raises MediaError for what is neither."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    try:
        array = np.asarray(value)
    except (TypeError, ValueError) as error:
        raise MediaError(f"cannot be made an array: {error}") from error
    if array.dtype == object:
        raise MediaError(f"is a {type(value).__name__}, which is no array of numbers")
    return array
