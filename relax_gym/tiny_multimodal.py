"""Models built in code that see and hear: real classes and processors of Qwen's families, scaled down."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import Field, model_validator

from relax_gym.config import validate
from relax_gym.tiny_models import TinyOptions, build_tiny_qwen3, char_tokenizer, text_config, write_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, WhisperFeatureExtractor

MERGE = TEMPORAL = 2
"""Patches a side that are one token, and video frames that are one patch."""

VIDEO_FRAMES = 32
"""Of more frames, each is scaled down to fit."""

FRAMES_PER_SECOND = 100
"""Of the spectrogram, Whisper's; Qwen's encoders make one token of four."""

VISION = {
    "image": "<|vision_start|><|image_pad|><|vision_end|>",
    "video": "<|vision_start|><|video_pad|><|vision_end|>",
}
AUDIO = {"audio": "<|audio_bos|><|AUDIO|><|audio_eos|>"}
OMNI = {
    "image": "<|vision_bos|><|IMAGE|><|vision_eos|>",
    "video": "<|vision_bos|><|VIDEO|><|vision_eos|>",
    **AUDIO,
}
OMNI_TOKENS = {
    **{f"{kind}_token": f"<|{kind.upper()}|>" for kind in OMNI},
    **{f"{kind}_{end}_token": f"<|{kind}_{end}|>" for kind in ("vision", "audio") for end in ("bos", "eos")},
}


class EncoderOptions(TinyOptions):
    """What the language model and every encoder in front of it take."""

    num_layers: int = Field(2, ge=1)
    init_scale: float = Field(4.0, gt=0, description="factor on the usual 0.02 init, of the encoders too")
    max_positions: int = Field(4096, ge=16)
    encoder_size: int = Field(64, ge=8, multiple_of=8, description="hidden size of the encoders")
    encoder_layers: int = Field(2, ge=1)

    @model_validator(mode="after")
    def _check_size(self) -> EncoderOptions:
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} must be a multiple of 2 * num_heads = {2 * self.num_heads}"
            )
        return self


class VisionOptions(EncoderOptions):
    """`[model.kwargs]` of `tiny-qwen3-vl`. A square of 2 x 2 patches is one token."""

    patch_size: int = Field(8, ge=2, description="pixels a side")
    max_pixels: int = Field(2**16, ge=1, description="larger images and frames are scaled down to it")


class AudioOptions(EncoderOptions):
    """`[model.kwargs]` of `tiny-qwen2-audio`. 40 ms of sound are one token."""

    audio_seconds: int = Field(4, ge=1, le=30, description="longest sound; what comes later is not heard")
    mel_bins: int = Field(32, ge=8)


class OmniOptions(VisionOptions, AudioOptions):
    """`[model.kwargs]` of `tiny-qwen2.5-omni`."""


class TinyModel(NamedTuple):
    """How a model is built: its options and what writes it to an empty folder."""

    options: type[TinyOptions]
    write: Callable[[Any, Path], None]

    def check(self, name: str, kwargs: Mapping[str, Any]) -> TinyOptions:
        """Options from `model.kwargs`. Raises ConfigError naming key, value and what is allowed."""
        return validate(self.options, kwargs, source=name, prefix="model.kwargs")


def build_tiny_qwen3_vl(options: VisionOptions, folder: Path) -> None:
    """Images and videos; the times of frames are text."""
    import transformers as hf

    tokenizer = char_tokenizer(VISION)
    patches = _patches(options)
    size = patches["size"] | {"longest_edge": VIDEO_FRAMES * options.max_pixels}  # of all frames together
    most = max(1, options.max_pixels // (MERGE * options.patch_size) ** 2)
    videos = hf.Qwen3VLVideoProcessor(**patches | {"size": size}, cap_pixels_per_frame=True, max_video_tokens=most)
    images = hf.Qwen2VLImageProcessor(**patches)
    processor = hf.Qwen3VLProcessor(images, tokenizer, videos, chat_template=tokenizer.chat_template)
    tokens = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
    config = hf.Qwen3VLConfig(
        text_config=_text(options, tokenizer, options.head_dim) | {"head_dim": options.head_dim},
        vision_config=_vision(options) | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
        tie_word_embeddings=True,
        **{f"{name}_token_id": _id(tokenizer, f"<|{token}|>") for name, token in tokens.items()},
    )
    write_model(lambda: hf.Qwen3VLForConditionalGeneration(config), processor, options, folder)


def build_tiny_qwen2_audio(options: AudioOptions, folder: Path) -> None:
    """Sounds, all padded to `audio_seconds` for the encoder."""
    import transformers as hf

    tokenizer = char_tokenizer(AUDIO)
    processor = hf.Qwen2AudioProcessor(_listener(options), tokenizer, chat_template=tokenizer.chat_template)
    config = hf.Qwen2AudioConfig(
        text_config=text_config(options, len(tokenizer)) | {"model_type": "qwen2"},
        audio_config=_hearing(options) | {"model_type": "qwen2_audio_encoder"},
        audio_token_index=_id(tokenizer, "<|AUDIO|>"),
        tie_word_embeddings=True,  # type: ignore[call-arg] # taken as every config takes it
    )
    write_model(lambda: hf.Qwen2AudioForConditionalGeneration(config), processor, options, folder)


def build_tiny_qwen2_5_omni(options: OmniOptions, folder: Path) -> None:
    """The thinker: images, videos and sounds; times are positions."""
    import transformers as hf

    tokenizer = char_tokenizer(OMNI, **OMNI_TOKENS)
    processor = hf.Qwen2_5OmniProcessor(
        image_processor=hf.Qwen2VLImageProcessor(**_patches(options)),
        video_processor=hf.Qwen2VLVideoProcessor(**_patches(options)),
        feature_extractor=_listener(options),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
    )
    names = {f"{kind}_token_id": f"{kind}_token" for kind in OMNI}
    names |= {f"{kind}_start_token_id": f"{kind}_bos_token" for kind in ("vision", "audio")}
    names |= {f"{kind}_end_token_id": f"{kind}_eos_token" for kind in ("vision", "audio")}
    windows = {"window_size": 4 * options.patch_size, "fullatt_block_indexes": [options.encoder_layers - 1]}
    config = hf.Qwen2_5OmniThinkerConfig(
        text_config=_text(options, tokenizer, options.hidden_size // options.num_heads),
        vision_config=_vision(options) | windows,
        audio_config=_hearing(options) | {"n_window": 25, "output_dim": options.hidden_size},
        tie_word_embeddings=True,
        **{key: _id(tokenizer, OMNI_TOKENS[name]) for key, name in names.items()},
    )
    write_model(lambda: hf.Qwen2_5OmniThinkerForConditionalGeneration(config), processor, options, folder)


def _id(tokenizer: PreTrainedTokenizerBase, token: str) -> Any:
    return tokenizer.convert_tokens_to_ids(token)


def _text(options: EncoderOptions, tokenizer: PreTrainedTokenizerBase, head_dim: int) -> dict[str, Any]:
    """A decoder with positions along three axes: time, height, width."""
    side = head_dim // 2 // 3
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [head_dim // 2 - 2 * side, side, side]}
    return text_config(options, len(tokenizer)) | {"rope_parameters": rope}


def _patches(options: VisionOptions) -> dict[str, Any]:
    return {
        "patch_size": options.patch_size,
        "merge_size": MERGE,
        "temporal_patch_size": TEMPORAL,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "size": {"shortest_edge": (MERGE * options.patch_size) ** 2, "longest_edge": options.max_pixels},
    }


def _vision(options: VisionOptions) -> dict[str, Any]:
    return {
        "depth": options.encoder_layers,
        "hidden_size": options.encoder_size,
        "intermediate_size": 2 * options.encoder_size,
        "num_heads": 2,
        "patch_size": options.patch_size,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": TEMPORAL,
        "out_hidden_size": options.hidden_size,
    }


def _listener(options: AudioOptions) -> WhisperFeatureExtractor:
    from transformers import WhisperFeatureExtractor

    return WhisperFeatureExtractor(feature_size=options.mel_bins, chunk_length=options.audio_seconds)


def _hearing(options: AudioOptions) -> dict[str, Any]:
    return {
        "num_mel_bins": options.mel_bins,
        "encoder_layers": options.encoder_layers,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 2 * options.encoder_size,
        "d_model": options.encoder_size,
        "max_source_positions": FRAMES_PER_SECOND // 2 * options.audio_seconds,
    }


TINY_MODELS = {
    "tiny-qwen3": TinyModel(TinyOptions, build_tiny_qwen3),
    "tiny-qwen3-vl": TinyModel(VisionOptions, build_tiny_qwen3_vl),
    "tiny-qwen2-audio": TinyModel(AudioOptions, build_tiny_qwen2_audio),
    "tiny-qwen2.5-omni": TinyModel(OmniOptions, build_tiny_qwen2_5_omni),
}
