"""Images, sounds and videos as `/generate` takes them: data URIs that lose nothing, each made once."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from relax_gym.errors import SamplerError
from relax_gym.media.items import Audio, Image, Media, Video
from relax_gym.processing import MediaProcessor
from relax_gym.types import Placed
from relax_gym_plugins.samplers.sglang.engine import Engine
from relax_gym_plugins.samplers.sglang.protocol import BadReply
from relax_gym_plugins.samplers.sglang.wire_video import pairs, refusal

VIDEO_MODELS = ("qwen3_vl", "qwen3_vl_moe")
"""Model types whose servers get to know when frames were shown."""
VIDEO_VERSION = (0, 5, 23)


@dataclass(frozen=True, slots=True)
class Wire:
    """One item: what is sent, and the text around its placeholders that the server writes itself."""

    uris: list[str]
    before: str = ""
    after: str = ""


class WireMedia:
    """Prompts with media. Items are encoded in a thread, once as long as they are held.

    Args:
        model_type: of the model's configuration.
        tokenizer: the model's.
        processor: the model's, None for a model of text only.
        engines: gives the servers that a request may go to.
    """

    def __init__(
        self,
        model_type: str,
        tokenizer: Any,
        processor: MediaProcessor | None,
        engines: Callable[[], Iterable[Engine]],
    ) -> None:
        self._model_type, self._tokenizer, self._processor, self._engines = model_type, tokenizer, processor, engines
        self._made: WeakKeyDictionary[Media, Wire] = WeakKeyDictionary()

    async def request(self, ids: Sequence[int], media: Sequence[Placed]) -> tuple[list[int], dict[str, Any]]:
        """The ids as a server expands them itself, and the media in the order of their tokens.

        Raises:
            SamplerError: a server would read something else.
        """
        if not media:
            return list(ids), {}
        for placed in media:
            self._check(placed.media)
        if new := {placed.media for placed in media if placed.media not in self._made}:
            self._made.update(await asyncio.to_thread(lambda: [(item, self._wire(item)) for item in new]))
        out: list[int] = []
        body: dict[str, Any] = {"return_prompt_token_ids": True}
        at = 0
        for placed in media:
            wire = self._made[placed.media]
            out += [*ids[at : placed.start - self._count(wire.before)], *[ids[placed.start]] * len(wire.uris)]
            at = placed.end + self._count(wire.after)
            body.setdefault(f"{placed.media.kind}_data", []).extend(wire.uris)
        out += ids[at:]
        if any(not isinstance(placed.media, Image) for placed in media):
            self._check_text(out)
        return out, body

    def _count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False)) if text else 0

    def _check(self, item: Media) -> None:
        if isinstance(item, Audio) and self._model_type == "qwen2_audio":
            raise SamplerError(
                "SGLang's Qwen2-Audio also hears the silence that sounds are filled up with, and ends at two sounds in "
                "one request; use the local sampler"
            )
        if not isinstance(item, Video):
            return
        if self._model_type not in VIDEO_MODELS:
            raise SamplerError(
                f"SGLang does not read videos for {self._model_type} as they are trained on, only for "
                f"{' and '.join(VIDEO_MODELS)}; use the local sampler"
            )
        for engine in self._engines():
            if engine.features.version < VIDEO_VERSION:
                raise SamplerError(
                    f"{engine} is too old for videos; upgrade to SGLang 0.5.23, or use the local sampler"
                )
            if reason := refusal(item.frames.shape, engine.info):
                raise SamplerError(
                    f"{engine} cannot read {item!r} as it is trained on: {reason}, or use the local sampler"
                )

    def _check_text(self, ids: list[int]) -> None:
        """Servers decode prompts with sounds or videos and encode the text, which may give other ids than sampled."""
        text = self._tokenizer.decode(ids)
        if (again := list(self._tokenizer(text)["input_ids"])) != ids:
            at = next(
                (n for n, (a, b) in enumerate(zip(again, ids, strict=False)) if a != b), min(len(again), len(ids))
            )
            raise SamplerError(
                f"SGLang would read other tokens: it encodes the text of prompts with sounds or videos anew, and from "
                f"token {at} on this one was sampled in other pieces ({ids[at : at + 5]}, not {again[at : at + 5]}); "
                "use the local sampler for several turns with sounds or videos"
            )

    def _wire(self, item: Media) -> Wire:
        match item:
            case Image():
                return Wire([_uri("image/png", _png(item))])
            case Audio():
                return Wire([_uri("audio/wav", _wav(item))])
            case Video():
                return self._video(item)
        raise SamplerError(f"{item!r} cannot be sent to SGLang")

    def _video(self, item: Video) -> Wire:
        assert self._processor is not None
        features, token = self._processor.features(item), self._processor.tokens["video"]
        pair = self._processor.features(item.thinned(2)) if len(item.frames) > 2 else features
        grids = [made.tensors["video_grid_thw"][0, 1:].tolist() for made in (features, pair)]
        if grids[0] != grids[1]:
            raise SamplerError(
                f"{item!r} is scaled for all its frames together, which SGLang cannot do here; lower "
                "media.resize_pixels or media.video_max_frames, or use the local sampler"
            )
        uris = [_uri("video/avi", data) for data in pairs(item.frames, features.text)]
        return Wire(uris, before=features.text.split(token)[0], after=features.text.split(token)[-1])


def check_prompt(reply: Mapping[str, Any], ids: Sequence[int]) -> None:
    """Raise BadReply when the server says that it has read other ids; those before 0.5.20 do not say."""
    read = reply.get("prompt_token_ids")
    if read is not None and list(read) != list(ids):
        at = next((n for n, (a, b) in enumerate(zip(read, ids, strict=False)) if a != b), min(len(read), len(ids)))
        raise BadReply(
            f"the server read {read[at : at + 5]} at token {at} of the prompt, not {list(ids[at : at + 5])}; is its "
            "model or its processor another one?"
        )


def _uri(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _png(item: Image) -> bytes:
    import PIL.Image

    out = io.BytesIO()
    PIL.Image.fromarray(np.asarray(item.pixels)).save(out, "png", compress_level=1)
    return out.getvalue()


def _wav(item: Audio) -> bytes:
    import soundfile

    out = io.BytesIO()
    soundfile.write(out, item.samples, item.rate, format="WAV", subtype="FLOAT")
    return out.getvalue()
