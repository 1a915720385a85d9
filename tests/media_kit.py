"""Media, conversations that hold them, and what the family's own processor makes of a whole conversation at once."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import families
import numpy as np
import torch
from transformers.video_utils import VideoMetadata

from relax_gym.chat import ChatRenderer, Conversation
from relax_gym.media.items import Audio, Image, Media, Video
from relax_gym.processing import MediaProcessor
from relax_gym.types import Message

READS = {
    "qwen2_5_vl": ("image", "video"),
    "qwen3_vl": ("image", "video"),
    "qwen2_5_omni": ("image", "video", "audio"),
    "qwen3_omni": ("image", "video", "audio"),
    "qwen2_audio": ("audio",),
    "smolvlm": ("image", "video"),
    "idefics3": ("image",),
    "gemma3": ("image",),
}
"""What each family reads."""


def image(seed: int = 0, height: int = 32, width: int = 48) -> Image:
    """Noise."""
    return Image(pixels=np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def audio(seed: int = 0, seconds: float = 0.7) -> Audio:
    """A tone and a little noise."""
    rng, times = np.random.default_rng(seed), np.arange(round(families.RATE * seconds)) / families.RATE
    samples = np.sin(2 * np.pi * 300 * (seed + 1) * times) / 2 + rng.standard_normal(len(times)) / 50
    return Audio(samples=samples.astype(np.float32), rate=families.RATE)


def video(seed: int = 0, frames: int = 4, fps: float = 2.0, sound: Audio | None = None) -> Video:
    """Noise, every fifth frame of a video with `5 * fps` frames a second."""
    return Video(
        frames=np.random.default_rng(seed).integers(0, 256, (frames, 32, 32, 3), dtype=np.uint8),
        times=np.arange(frames) / fps,
        indices=np.arange(frames) * 5,
        total_frames=frames * 5,
        duration=frames / fps,
        audio=sound,
    )


SIZES = {
    "image": ({}, {"height": 64, "width": 32}, {"height": 24, "width": 80}),
    "video": ({}, {"frames": 3}, {"frames": 2}),
    "audio": ({}, {"seconds": 0.1}, {"seconds": 0.95}),
}
MAKERS: dict[str, Any] = {"image": image, "video": video, "audio": audio}


def make(kind: str, seed: int) -> Media:
    """One item; sizes differ with the seed."""
    made: Media = MAKERS[kind](seed, **SIZES[kind][seed % 3])
    return made


def user(*content: str | Media, role: str = "user") -> Message:
    """A message of texts and items."""
    parts: list[dict[str, Any]] = [
        {"type": "text", "text": c} if isinstance(c, str) else {"type": c.kind, c.kind: c} for c in content
    ]
    return {"role": role, "content": parts}


def said(text: str) -> Message:
    """A model's answer."""
    return {"role": "assistant", "content": text}


def items(messages: Sequence[Message]) -> list[Media]:
    """All media of messages in order."""
    contents = [m["content"] for m in messages if not isinstance(m["content"], str)]
    return [part[part["type"]] for content in contents for part in content if part["type"] != "text"]


def converse(renderer: ChatRenderer, messages: Sequence[Message]) -> Conversation:
    """Turn by turn, up to and with the last answer."""
    conversation = renderer.conversation()
    observation: list[Message] = []
    for message in messages:
        if message["role"] == "assistant":
            conversation.observe(observation)
            conversation.complete(renderer.encode_answer(message["content"]))
            observation = []
        else:
            observation.append(message)
    assert not observation, "a conversation ends with an answer"
    return conversation


def single_pass(processor: Any, messages: Sequence[Message], *, sound: bool = False) -> dict[str, Any]:
    """What the family's own processor makes of the whole conversation, media in one list for each kind."""
    bare = [
        m
        if isinstance(m["content"], str)
        else {**m, "content": [{k: p[k] for k in ("type", "text") if k in p} for p in m["content"]]}
        for m in messages
    ]
    text = processor.tokenizer.apply_chat_template(bare, tokenize=False)
    arguments: dict[str, Any] = {}
    given = items(messages)
    if images := [item for item in given if isinstance(item, Image)]:
        arguments["images"] = [torch.from_numpy(item.pixels.copy()).permute(2, 0, 1) for item in images]
    if videos := [item for item in given if isinstance(item, Video)]:
        arguments |= {
            "videos": [torch.from_numpy(item.frames.copy()).permute(0, 3, 1, 2) for item in videos],
            "video_metadata": [metadata(item) for item in videos],
            "do_sample_frames": False,
            "fps": videos[0].sampled_fps,
            "videos_kwargs": {"size": dict(processor.video_processor.size)},
        }
    heard = [item for item in given if isinstance(item, Audio) or (sound and isinstance(item, Video) and item.audio)]
    if heard:
        tracks = [item.audio if isinstance(item, Video) else item for item in heard]
        arguments |= {"audio": [t.samples for t in tracks if isinstance(t, Audio)], "sampling_rate": families.RATE}
    if sound:
        sources = [videos.index(item) if isinstance(item, Video) else None for item in heard]
        arguments |= {"load_audio_from_video": True, "audio_from_video_indices": sources}
    return dict(processor(text=[text], return_tensors="pt", **arguments))


def metadata(video: Video) -> VideoMetadata:
    """As a decoder would give it."""
    return VideoMetadata(
        total_num_frames=video.total_frames,
        fps=video.fps,
        duration=video.duration,
        frames_indices=video.indices.tolist(),
    )


def plain_logits(
    model: Any, processor: MediaProcessor, ids: Sequence[int], media: Sequence[Media], **more: Any
) -> torch.Tensor:
    """Logits [T, vocabulary] of one plain forward of the model's own class, which makes positions and masks itself."""
    row = torch.tensor([list(ids)])
    given: Mapping[str, Any] = processor.inputs(media)
    accepted = inspect.signature(model.forward).parameters
    named = {
        name: torch.from_numpy(processor.token_types(np.array(ids)))[None]
        for name in ("mm_token_type_ids", "token_type_ids")
        if name in accepted
    }
    with torch.no_grad():
        logits = model(
            input_ids=row, attention_mask=torch.ones_like(row), use_cache=False, **named, **given, **more
        ).logits
    return logits[0]
