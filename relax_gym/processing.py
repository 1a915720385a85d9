"""Images, sounds and videos as a model reads them: what stands for each in the prompt, and the tensors behind it.

A Hugging Face processor is asked for one item at a time, so an item costs the same in whatever turn it comes, and means
the same to the sampler and to the learner. What it stands for in prompts is kept while the item lives, its tensors as
far as there is room.
"""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from relax_gym.config import MediaConfig
from relax_gym.errors import MediaError, ModelError, TemplateError
from relax_gym.features import LARGE, FeatureCache, Features
from relax_gym.media.items import KINDS, Audio, Image, Kind, Media, Video
from relax_gym.models import load_processor
from relax_gym.types import Placed

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, ProcessorMixin

ARGUMENTS: dict[Kind, str] = {"image": "images", "video": "videos", "audio": "audio"}
TEXT_OUTPUTS = {
    "input_ids",
    "attention_mask",
    "token_type_ids",
    "mm_token_type_ids",
    "text_replacement_offsets",
    "video_metadata",
}
CUT = 0.05
"""Seconds of the end of a sound that nobody misses."""

BIDIRECTIONAL = {"gemma3"}
"""Model types whose image tokens also see the later tokens of their image."""

MERGED = {
    "pixel_values",
    "pixel_attention_mask",
    "image_grid_thw",
    "pixel_values_videos",
    "video_grid_thw",
    "second_per_grid_ts",
    "video_second_per_grid",
    "input_features",
    "feature_attention_mask",
}
"""The model inputs that are known to be put together by padding and concatenation."""


class MediaProcessor:
    """A Hugging Face processor as a function of single items. Threads may share it.

    Args:
        processor: the model's processor.
        kwargs: more arguments of its call, such as `{"images_kwargs": {...}}`.
        sound_in_video: whether sound tracks of videos are heard, interleaved with the frames.
        cache_bytes: how many bytes of tensors of what was used last are kept.
    """

    def __init__(
        self,
        processor: ProcessorMixin,
        kwargs: Mapping[str, Any] | None = None,
        *,
        sound_in_video: bool = False,
        cache_bytes: int = 2**30,
    ) -> None:
        self.processor: Any = processor
        self._kwargs = dict(kwargs or {})
        self._sound_in_video = sound_in_video
        self._cache = FeatureCache(cache_bytes)
        self._lock = threading.Lock()
        tokens = {kind: getattr(processor, f"{kind}_token", None) for kind in KINDS}
        self.tokens: dict[Kind, str] = {kind: token for kind, token in tokens.items() if token is not None}
        ids = [id for kind in KINDS for id in getattr(self.processor, f"{kind}_token_ids", ())]
        self.placeholder_ids = np.array(sorted({int(id) for id in ids if id is not None}), dtype=np.int64)
        self._pattern = re.compile("|".join(f"(?P<{kind}>{re.escape(token)})" for kind, token in self.tokens.items()))

    def __getstate__(self) -> dict[str, Any]:
        """Without the lock; what another process is sent."""
        return self.__dict__ | {"_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """See `__getstate__`."""
        self.__dict__ |= state | {"_lock": threading.Lock()}

    @classmethod
    def load(cls, folder: Path, config: MediaConfig, *, trust_remote_code: bool = False) -> MediaProcessor | None:
        """The processor of a model folder; None when the model reads text only. Raises ModelError when it is broken."""
        processor = load_processor(folder, trust_remote_code=trust_remote_code)
        if processor is None:
            return None
        return cls(
            processor,
            config.processor_kwargs,
            sound_in_video=config.sound_in_video,
            cache_bytes=config.cache_bytes,
        )

    @property
    def audio_rate(self) -> int | None:
        """Samples per second that the model hears; None when it hears nothing."""
        names = ("feature_extractor", "audio_processor")
        extractor = next((found for name in names if (found := getattr(self.processor, name, None))), None)
        return None if extractor is None else int(extractor.sampling_rate)

    def features(self, media: Media) -> Features:
        """What the model reads of an item; the same object as long as it is cached.

        Raises:
            MediaError: the model does not read such items, or its processor refuses this one.
        """
        known = self._cache.whole(media)
        if known is None:
            with self._lock:  # the tokenizer inside the processor must not be used by two threads at once
                known = self._cache.whole(media)
                if known is None:
                    known = self._process(media)
                    self._cache.keep(media, known)
        return known

    def outline(self, media: Media) -> Features:
        """The same, but large tensors may be missing. Once made, they are known as long as the item lives.

        Raises:
            MediaError: as `features`.
        """
        return self._cache.outline(media) or self.features(media)

    def fitted(self, media: Media, max_tokens: int | None = None) -> Media:
        """The item, or as much of a video as stands for at most `max_tokens` tokens. Its outline is made here.

        Raises:
            MediaError: not even one frame fits; and as `features`.
        """
        tokens = self.outline(media).placeholders
        if not isinstance(media, Video) or max_tokens is None or tokens <= max_tokens:
            return media
        if len(media.frames) == 1:
            raise MediaError(
                f"one frame of {media!r} is {tokens} tokens, media.video_max_tokens = {max_tokens}; raise it, or set "
                "media.resize_pixels to make frames smaller"
            )
        fewer = min(len(media.frames) - 1, len(media.frames) * max_tokens // tokens)
        return self.fitted(media.thinned(max(1, fewer)), max_tokens)

    def _process(self, media: Media) -> Features:
        token = self.tokens.get(media.kind)
        if token is None:
            raise MediaError(
                f"{type(self.processor).__name__} reads {' and '.join(self.tokens) or 'text only'}, not {media.kind}; "
                "use another model, or an environment without"
            )
        from torch import autocast

        arguments = {**self._kwargs, **self._arguments(media)}
        try:
            with autocast("cpu", enabled=False):  # a learner may ask within its own
                out = self.processor(
                    text=[token], return_tensors="pt", return_text_replacement_offsets=True, **arguments
                )
        except Exception as error:  # a processor raises whatever the arithmetic on a strange shape raises
            raise MediaError(f"{type(self.processor).__name__} cannot process {media!r}: {error}") from error
        (replacement,) = out["text_replacement_offsets"][0]
        unknown = out.keys() - TEXT_OUTPUTS - MERGED
        if unknown:
            raise ModelError(
                f"{type(self.processor).__name__} gives {', '.join(sorted(unknown))}, which relax-gym cannot hand to "
                "the model; this model family is not supported"
            )
        placeholders = int(np.isin(out["input_ids"][0].numpy(), self.placeholder_ids).sum())
        if not placeholders:
            raise MediaError(f"{type(self.processor).__name__} makes no token of {media!r}; give a longer one")
        sound = media.audio if isinstance(media, Video) else media
        if isinstance(sound, Audio) and "feature_attention_mask" in out:
            self._check_heard(sound, int(out["feature_attention_mask"].sum()))
        return Features(
            text=replacement["replacement"],
            placeholders=placeholders,
            tensors={key: out[key] for key in sorted(out.keys() & MERGED)},
        )

    def _check_heard(self, audio: Audio, steps: int) -> None:
        """Raise MediaError when the feature extractor has cut the end off."""
        heard = steps * self.processor.feature_extractor.hop_length / audio.rate
        if heard < audio.seconds - CUT:
            raise MediaError(
                f"{audio!r} is longer than the {heard:g} s that {type(self.processor).__name__} takes at a time; give "
                "shorter pieces"
            )

    def _arguments(self, media: Media) -> dict[str, Any]:
        match media:
            case Image():
                from PIL.Image import fromarray

                return {"images": [fromarray(media.pixels)]}
            case Audio():
                return {"audio": [media.samples], "sampling_rate": media.rate}
            case Video():
                return self._video_arguments(media)
        raise TypeError(type(media).__name__)

    def _video_arguments(self, video: Video) -> dict[str, Any]:
        import torch
        from transformers.video_utils import VideoMetadata

        scale, indices, total = video.fps, video.indices, video.total_frames
        if not np.allclose(indices / scale, video.times, atol=1e-3):
            # A variable frame rate: processors know only numbers of frames, so milliseconds are counted as frames.
            scale, indices, total = 1000.0, np.rint(video.times * 1000), round(video.duration * 1000)
        # Some processors refuse fewer frames than a patch has; the others repeat the last one too.
        lacking = getattr(self.processor.video_processor, "temporal_patch_size", 1) - len(video.frames)
        frames = np.concatenate([video.frames, video.frames[-1:].repeat(max(0, lacking), axis=0)])
        _, height, width, _ = frames.shape
        metadata = VideoMetadata(
            total_num_frames=total,
            fps=scale,
            width=width,
            height=height,
            duration=video.duration,
            frames_indices=[int(index) for index in indices],
        )
        given = self._kwargs.get("videos_kwargs", {})
        # Some processors have a default size of their own that would replace that of the model's configuration.
        size = {"size": dict(self.processor.video_processor.size)}
        arguments: dict[str, Any] = {
            "videos": [torch.from_numpy(frames).permute(0, 3, 1, 2)],
            "video_metadata": [metadata],
            "videos_kwargs": {**size, **given, "do_sample_frames": False, "fps": video.sampled_fps},
        }
        if self._sound_in_video and video.audio is not None and "audio" in self.tokens:
            sound = {"audio": [video.audio.samples], "sampling_rate": video.audio.rate}
            arguments |= {**sound, "load_audio_from_video": True, "audio_from_video_indices": [0]}
        return arguments

    # Prompts ---------------------------------------------------------------------------------------------------------

    def expand(self, text: str, media: Sequence[Media], unmarked: str = "") -> str:
        """`text` with what stands for each item instead of its placeholder. `unmarked` is a pattern that must match
        before a placeholder for it to count.

        Raises:
            TemplateError: the placeholders in the text are not those of the items.
        """
        found = list(re.finditer(f"{unmarked}(?:{self._pattern.pattern})", text))
        kinds = [match.lastgroup for match in found]
        if kinds != [item.kind for item in media]:
            raise TemplateError(
                f"the chat template shows {', '.join(map(str, kinds)) or 'no media'} for messages with "
                f"{', '.join(item.kind for item in media) or 'no media'}; give a template in chat.template that shows "
                "each where it stands"
            )
        pieces, last = [], 0
        for match, item in zip(found, media, strict=True):
            pieces += [text[last : match.start()], self.outline(item).text]
            last = match.end()
        return "".join([*pieces, text[last:]])

    def place(self, ids: Sequence[int] | NDArray[np.integer[Any]], media: Sequence[Media]) -> tuple[Placed, ...]:
        """Where the items are in `ids`.

        Raises:
            MediaError: the ids do not hold as many placeholders as the items have.
        """
        where = np.flatnonzero(np.isin(np.asarray(ids), self.placeholder_ids))
        counts = [self.outline(item).placeholders for item in media]
        if sum(counts) != len(where):
            raise MediaError(
                f"{len(where)} placeholder tokens for {len(media)} items that need {sum(counts)}; image, video and "
                "audio tokens come from media only"
            )
        placed, first = [], 0
        for item, count in zip(media, counts, strict=True):
            own = where[first : first + count]
            placed.append(Placed(media=item, start=int(own[0]), end=int(own[-1]) + 1))
            first += count
        return tuple(placed)

    # Model inputs ----------------------------------------------------------------------------------------------------

    def inputs(self, media: Sequence[Media], names: Container[str] | None = None) -> dict[str, Tensor]:
        """The model's arguments (those of some names, if given) for items in the order of their placeholders, row after
        row of a batch."""
        small = names is not None and not any(name in names for name in LARGE)
        read = self.outline if small else self.features
        parts: dict[str, list[Tensor]] = {}
        for item in media:
            for key, tensor in read(item).tensors.items():
                if names is None or key in names:
                    parts.setdefault(key, []).append(tensor)
        return {key: _join(key, tensors) for key, tensors in parts.items()}

    def token_types(self, ids: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """[L]: 0 text, 1 image, 2 video, 3 audio."""
        (types,) = self.processor.create_mm_token_type_ids([ids.tolist()])
        return np.array(types, dtype=np.int64)

    @staticmethod
    def rope_index(model: PreTrainedModel) -> Any:
        """The model's own function for position ids along several axes (M-RoPE, TM-RoPE), None when it has one axis."""
        return getattr(model, "get_rope_index", None) or getattr(model.base_model, "get_rope_index", None)

    def positions(
        self, model: PreTrainedModel, ids: NDArray[np.integer[Any]], media: Sequence[Media]
    ) -> NDArray[np.number[Any]]:
        """Position ids of one whole sequence, computed from its ids and the grids of its items: [3, L] for a model with
        several axes, else and without media [L]. Some models have fractions between the frames of a video.
        """
        if self.rope_index(model) is None or not media:
            return np.arange(len(ids))
        found: list[NDArray[np.number[Any]]] = []
        for part, items in self._stretches(ids, media):
            found.append(self._axes(model, part, items) + (found[-1].max() + 1 if found else 0))
        return np.concatenate(found, axis=1)

    def _stretches(
        self, ids: NDArray[np.integer[Any]], media: Sequence[Media]
    ) -> Iterator[tuple[NDArray[np.integer[Any]], Sequence[Media]]]:
        """The sequence, cut before each video that is heard where the last was not, or the other way round: models'
        functions take them all for one or the other. Two tokens of a heard video are in front of its first placeholder.
        """
        start, first, last = 0, 0, None
        for index, placed in enumerate(self.place(ids, media)):
            if not isinstance(placed.media, Video):
                continue
            heard = self._heard(placed.media)
            if last is not None and heard != last:
                end = placed.start - (2 if heard else 1)
                yield ids[start:end], media[first:index]
                start, first = end, index
            last = heard
        yield ids[start:], media[first:]

    def _heard(self, media: Media) -> bool:
        return isinstance(media, Video) and "feature_attention_mask" in self.outline(media).tensors

    def _axes(
        self, model: PreTrainedModel, ids: NDArray[np.integer[Any]], media: Sequence[Media]
    ) -> NDArray[np.number[Any]]:
        import torch

        compute = self.rope_index(model)
        wanted = inspect.signature(compute).parameters
        tensors = self.inputs(media, {*wanted, "video_second_per_grid", "feature_attention_mask"})
        row = torch.from_numpy(ids.astype(np.int64))[None]
        mask = tensors.get("feature_attention_mask")
        given = {
            **tensors,
            "input_ids": row,
            "attention_mask": torch.ones_like(row),
            "mm_token_type_ids": torch.from_numpy(self.token_types(ids)[None]),
            "second_per_grids": tensors.get("video_second_per_grid"),
            "audio_seqlens": None if mask is None else mask.sum(-1),
            "use_audio_in_video": any(map(self._heard, media)),
        }
        found = compute(**{name: given[name] for name in wanted if given.get(name) is not None})[0]
        positions: NDArray[np.number[Any]] = found[:, 0].cpu().numpy()
        return positions


def _join(key: str, tensors: Sequence[Tensor]) -> Tensor:
    """Along the axis that items are counted in; the other axes padded with zeros to the longest."""
    import torch

    axis = 1 if tensors[0].ndim == 5 or key == "pixel_attention_mask" else 0
    longest = [max(sizes) for sizes in zip(*(tensor.shape for tensor in tensors), strict=True)]
    padded = []
    for tensor in tensors:
        missing = [want - have for want, have in zip(longest, tensor.shape, strict=True)]
        missing[axis] = 0
        sides = [size for wanting in reversed(missing) for size in (0, wanting)]  # torch pads the last axis first
        padded.append(torch.nn.functional.pad(tensor, sides) if any(sides) else tensor)
    return torch.cat(padded, dim=axis)
