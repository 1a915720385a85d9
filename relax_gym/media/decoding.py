"""What happens in a decoding worker: one encoded item in, one loaded item out. Imports little; a worker starts fast."""

from __future__ import annotations

import base64
import http.client
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_gym.config import MediaConfig
from relax_gym.errors import MediaError
from relax_gym.media.items import Kind, Media
from relax_gym.media.sources import Url, is_positive

if TYPE_CHECKING:
    from relax_gym.media.video import VideoPlan

CHUNK = 2**16
USER_AGENT = "relax-gym"
UNQUOTED = "%!#$&'()*+,/:;=?@[]~"
"""What may stand in an address as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """How an item is wanted: limits, and the rate of samples per second that the model hears (None: as it is).

    `fps`, `min_frames` and `max_frames` are of the content part of a video, instead of the config's.
    """

    config: MediaConfig
    rate: int | None
    fps: float | None = None
    min_frames: int | None = None
    max_frames: int | None = None

    def __post_init__(self) -> None:
        for name in ("fps", "min_frames", "max_frames"):
            value = getattr(self, name)
            whole = name != "fps"
            if value is not None and not (is_positive(value) and (not whole or value == int(value))):
                raise MediaError(f"has {name} = {value!r}; it must be a positive {'whole ' if whole else ''}number")

    def image(self) -> dict[str, Any]:
        """Arguments of `read_image` and `image_of`."""
        return {"max_pixels": self.config.max_pixels, "resize_pixels": self.config.resize_pixels}

    def audio(self) -> dict[str, Any]:
        """Arguments of `read_audio` and `audio_of`."""
        return {"rate": self.rate, "max_seconds": self.config.audio_max_seconds}

    def video(self) -> VideoPlan:
        """Which frames to take."""
        from relax_gym.media.video import VideoPlan

        most = self.max_frames or self.config.video_max_frames
        return VideoPlan(
            fps=self.fps or self.config.video_fps,
            min_frames=min(self.min_frames or self.config.video_min_frames, most),
            max_frames=most,
            max_pixels=self.config.max_pixels,
            resize_pixels=self.config.resize_pixels,
            sound_rate=self.rate if self.config.sound_in_video else None,
            max_seconds=self.config.audio_max_seconds,
        )


def decode(kind: Kind, source: Path | bytes | Url, wanted: Wanted) -> Media:
    """Load an encoded item.

    Raises:
        MediaError: says what is wrong with it, without its name.
    """
    data = download(source.address, wanted.config) if isinstance(source, Url) else source
    if isinstance(data, bytes) and len(data) > wanted.config.max_bytes:
        raise MediaError(f"has {len(data):,} bytes, media.max_bytes = {wanted.config.max_bytes}")
    if kind == "image":
        import PIL.Image

        from relax_gym.media.images import read_image

        PIL.Image.MAX_IMAGE_PIXELS = None  # the limit here is max_pixels, and this process is ours
        return read_image(data, **wanted.image())
    if kind == "audio":
        from relax_gym.media.audio import read_audio

        return read_audio(data, **wanted.audio())
    from relax_gym.media.video import read_video

    return read_video(data, wanted.video())


def download(address: str, config: MediaConfig) -> bytes:
    """What is at an address. The time it may take is limited by who runs this.

    Raises:
        MediaError: it cannot be reached, breaks off, or is larger than `config.max_bytes`.
    """
    data = bytearray()
    try:
        request = _request(urllib.parse.quote(address, safe=UNQUOTED))
        with urllib.request.urlopen(request, timeout=config.timeout) as answer:
            while piece := answer.read(CHUNK):
                data += piece
                if len(data) > config.max_bytes:
                    raise MediaError(f"is larger than media.max_bytes = {config.max_bytes}")
            if getattr(answer, "length", None):
                raise MediaError(f"breaks off: {answer.length:,} bytes of it did not come")
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise MediaError(f"cannot be downloaded: {getattr(error, 'reason', error)}") from error
    return bytes(data)


def _request(address: str) -> urllib.request.Request:
    """What to send for an address. A user and password in it go into a header, which no redirect takes elsewhere."""
    parts = urllib.parse.urlsplit(address)
    login, found, host = parts.netloc.rpartition("@")
    request = urllib.request.Request(parts._replace(netloc=host).geturl(), headers={"User-Agent": USER_AGENT})
    if found:
        secret = base64.b64encode(urllib.parse.unquote_to_bytes(login)).decode()
        request.add_unredirected_header("Authorization", f"Basic {secret}")
    return request
