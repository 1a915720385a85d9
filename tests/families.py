"""A tiny model folder of every family that reads images, videos or audio: real classes, random weights, no download.

A new family is one function here and its name in `FAMILIES`; the media tests then hold for it too.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers as hf
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from relax_gym.chat import ChatRenderer
from relax_gym.models import load_language_model, load_processor, load_tokenizer
from relax_gym.processing import MediaProcessor

hf.logging.set_verbosity_error()

HIDDEN, RATE = 32, 16000
MEAN = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}{{ {MARKS}[part.type] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Parts(NamedTuple):
    """What a family's folder is made of."""

    model: Any
    config: Any
    processor: Any


def template(**marks: str) -> str:
    """A chat template that writes `marks` for the parts of messages."""
    return TEMPLATE.replace("{MARKS}", repr(marks))


def build_tokenizer(special: Sequence[str], named: Mapping[str, str] | None = None) -> Any:
    """One token for each printable character, role and special token; `named` ones are attributes too."""
    named = dict(named or {})
    special = list(dict.fromkeys(["<|endoftext|>", "<|im_start|>", "<|im_end|>", *special, *named.values()]))
    roles = ["system", "user", "assistant", "tool"]
    vocabulary = {token: id for id, token in enumerate([*special, *roles, "\n", *map(chr, range(32, 127)), "<unk>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(roles) + r"|[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<unk>",
        additional_special_tokens=[t for t in special if t not in (*named.values(), "<|im_end|>", "<|endoftext|>")],
        clean_up_tokenization_spaces=False,
        **({"extra_special_tokens": named} if named else {}),
    )


def text_config(
    tokenizer: Any, sections: Sequence[int] = (), *, interleaved: bool = False, **more: Any
) -> dict[str, Any]:
    """The decoder; `sections` are those of M-RoPE, `interleaved` in Qwen3's models."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections)}
    if interleaved:  # what others than transformers go by
        rope["mrope_interleaved"] = True
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
        **({"rope_parameters": rope} if sections else {}),
        **more,
    }


# Qwen's families --------------------------------------------------------------------------------------------------

VISION = {
    "image": "<|vision_start|><|image_pad|><|vision_end|>",
    "video": "<|vision_start|><|video_pad|><|vision_end|>",
}
OMNI = {
    "image": "<|vision_bos|><|IMAGE|><|vision_eos|>",
    "video": "<|vision_bos|><|VIDEO|><|vision_eos|>",
    "audio": "<|audio_bos|><|AUDIO|><|audio_eos|>",
}
OMNI_TOKENS = {
    "image_token": "<|IMAGE|>",
    "video_token": "<|VIDEO|>",
    "audio_token": "<|AUDIO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}


def patches(size: int) -> dict[str, Any]:
    """Of an image processor."""
    limits = {"shortest_edge": 4 * size**2, "longest_edge": 64 * size**2}
    return {"patch_size": size, "temporal_patch_size": 2, "merge_size": 2, "size": limits, **MEAN}


def vision_config(size: int, **more: Any) -> dict[str, Any]:
    """A vision encoder of Qwen."""
    return {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "patch_size": size,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": HIDDEN,
        **more,
    }


def audio_config(seconds: int, **more: Any) -> dict[str, Any]:
    """An audio encoder of Qwen that hears `seconds` of `whisper` features."""
    return {
        "num_mel_bins": 16,
        "encoder_layers": 1,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 32,
        "d_model": 32,
        "max_source_positions": 50 * seconds,
        **more,
    }


def whisper(seconds: int) -> Any:
    """Features of audio, 100 a second, of at most `seconds`."""
    return hf.WhisperFeatureExtractor(
        feature_size=16, sampling_rate=RATE, hop_length=RATE // 100, chunk_length=seconds, n_fft=400
    )


def qwen2_5_vl(seconds: int) -> Parts:
    """Windowed vision encoder; times of video frames as M-RoPE positions."""
    tokenizer, marks = build_tokenizer(["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]), VISION
    processor = hf.Qwen2_5_VLProcessor(
        image_processor=hf.Qwen2VLImageProcessor(**patches(8)),
        tokenizer=tokenizer,
        video_processor=hf.Qwen2VLVideoProcessor(**patches(8)),
        chat_template=template(**marks),
    )
    config = hf.Qwen2_5_VLConfig(
        text_config=text_config(tokenizer, [2, 3, 3]),
        vision_config=vision_config(8, window_size=32, fullatt_block_indexes=[1], tokens_per_second=2),
        **vision_ids(tokenizer),
    )
    return Parts(hf.Qwen2_5_VLForConditionalGeneration, config, processor)


def qwen3_vl(seconds: int) -> Parts:
    """Features for several decoder layers; times of video frames as text. Patches of 16 pixels."""
    tokenizer, marks = build_tokenizer(["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]), VISION
    processor = hf.Qwen3VLProcessor(
        image_processor=hf.Qwen2VLImageProcessor(**patches(16)),
        tokenizer=tokenizer,
        video_processor=hf.Qwen3VLVideoProcessor(**patches(16)),
        chat_template=template(**marks),
    )
    config = hf.Qwen3VLConfig(
        text_config=text_config(tokenizer, [3, 3, 2], interleaved=True, head_dim=16),
        vision_config=vision_config(16, num_position_embeddings=64, deepstack_visual_indexes=[0]),
        **vision_ids(tokenizer),
    )
    return Parts(hf.Qwen3VLForConditionalGeneration, config, processor)


def vision_ids(tokenizer: Any) -> dict[str, Any]:
    """Special ids in the config of Qwen's vision models."""
    names = {"image_token_id": "image_pad", "video_token_id": "video_pad"}
    names |= {"vision_start_token_id": "vision_start", "vision_end_token_id": "vision_end"}
    ids = {key: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for key, name in names.items()}
    return {**ids, "tie_word_embeddings": True}


def qwen2_5_omni(seconds: int) -> Parts:
    """The thinker: all kinds at once, times as TM-RoPE positions."""
    tokenizer = build_tokenizer([], OMNI_TOKENS)
    config = hf.Qwen2_5OmniThinkerConfig(
        text_config=text_config(tokenizer, [2, 3, 3]),
        vision_config=vision_config(8, window_size=32, fullatt_block_indexes=[1]),
        audio_config=audio_config(seconds, n_window=25, output_dim=HIDDEN),
        tie_word_embeddings=True,
        **omni_ids(tokenizer),
    )
    return Parts(
        hf.Qwen2_5OmniThinkerForConditionalGeneration,
        config,
        omni_processor(hf.Qwen2_5OmniProcessor, tokenizer, seconds),
    )


def qwen3_omni(seconds: int) -> Parts:
    """The thinker: all kinds at once, a mixture of experts."""
    tokenizer = build_tokenizer([], OMNI_TOKENS)
    experts = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
    hearing = {"n_window": 50, "n_window_infer": 100, "downsample_hidden_size": 16, "conv_chunksize": 500}
    text = text_config(tokenizer, [3, 3, 2], interleaved=True, head_dim=16, mlp_only_layers=[], **experts)
    config = hf.Qwen3OmniMoeThinkerConfig(
        text_config={**text, "tie_word_embeddings": False},
        vision_config=vision_config(8, num_position_embeddings=64, deepstack_visual_indexes=[0]),
        audio_config=audio_config(seconds, output_dim=HIDDEN, **hearing),
        tie_word_embeddings=False,
        position_id_per_seconds=13,
        **omni_ids(tokenizer),
    )
    return Parts(
        hf.Qwen3OmniMoeThinkerForConditionalGeneration,
        config,
        omni_processor(hf.Qwen3OmniMoeProcessor, tokenizer, seconds),
    )


def omni_processor(kind: Any, tokenizer: Any, seconds: int) -> Any:
    """Of either omni family."""
    return kind(
        image_processor=hf.Qwen2VLImageProcessor(**patches(8)),
        video_processor=hf.Qwen2VLVideoProcessor(**patches(8)),
        feature_extractor=whisper(seconds),
        tokenizer=tokenizer,
        chat_template=template(**OMNI),
    )


def omni_ids(tokenizer: Any) -> dict[str, int]:
    """Special ids in the config of a thinker."""
    names = {f"{kind}_token_id": f"{kind}_token" for kind in ("image", "video", "audio")}
    for kind in ("vision", "audio"):
        names |= {f"{kind}_start_token_id": f"{kind}_bos_token", f"{kind}_end_token_id": f"{kind}_eos_token"}
    return {key: tokenizer.convert_tokens_to_ids(OMNI_TOKENS[name]) for key, name in names.items()}


def qwen2_audio(seconds: int) -> Parts:
    """Audio only; positions along one axis."""
    tokenizer = build_tokenizer(["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"])
    processor = hf.Qwen2AudioProcessor(
        feature_extractor=whisper(seconds), tokenizer=tokenizer, chat_template=template(audio=OMNI["audio"])
    )
    config = hf.Qwen2AudioConfig(
        text_config=text_config(tokenizer, model_type="qwen2"),
        audio_config=audio_config(seconds, model_type="qwen2_audio_encoder"),
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
    )
    return Parts(hf.Qwen2AudioForConditionalGeneration, config, processor)


# Others -----------------------------------------------------------------------------------------------------------

SIGLIP = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
TILES = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
TILED_TOKENS = {
    "image_token": "<image>",
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
}
TILED = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}, **MEAN}


def smolvlm(seconds: int) -> Parts:
    """Images cut into tiles that tokens name; videos whose frames and times are text. `<video>` is no token."""
    tokenizer = build_tokenizer(TILES, TILED_TOKENS)
    processor = hf.SmolVLMProcessor(
        image_processor=hf.SmolVLMImageProcessor(**TILED, do_image_splitting=True),
        tokenizer=tokenizer,
        video_processor=hf.SmolVLMVideoProcessor(**TILED, do_image_splitting=False),
        image_seq_len=4,
        chat_template=template(image="<image>", video="<video>"),
    )
    return Parts(hf.SmolVLMForConditionalGeneration, hf.SmolVLMConfig(**tiled_config(tokenizer)), processor)


def idefics3(seconds: int) -> Parts:
    """Images cut into tiles that tokens name."""
    tokenizer = build_tokenizer(TILES, TILED_TOKENS)
    processor = hf.Idefics3Processor(
        image_processor=hf.Idefics3ImageProcessor(**TILED, do_image_splitting=True),
        tokenizer=tokenizer,
        image_seq_len=4,
        chat_template=template(image="<image>"),
    )
    return Parts(hf.Idefics3ForConditionalGeneration, hf.Idefics3Config(**tiled_config(tokenizer)), processor)


def tiled_config(tokenizer: Any) -> dict[str, Any]:
    """Of SmolVLM and Idefics3."""
    return {
        "text_config": text_config(tokenizer, model_type="llama"),
        "vision_config": {**SIGLIP, "image_size": 16, "patch_size": 4},
        "scale_factor": 2,
        "image_token_id": tokenizer.convert_tokens_to_ids("<image>"),
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    }


def gemma3(seconds: int) -> Parts:
    """Image tokens that see each other both ways, and sliding windows."""
    named = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    tokenizer = build_tokenizer([], named)
    processor = hf.Gemma3Processor(
        image_processor=hf.Gemma3ImageProcessor(size={"height": 32, "width": 32}, **MEAN),
        tokenizer=tokenizer,
        image_seq_length=4,
        chat_template=template(image="<start_of_image>"),
    )
    layers = ["sliding_attention", "full_attention"]
    text = text_config(tokenizer, head_dim=16, query_pre_attn_scalar=16, sliding_window=16, layer_types=layers)
    ids = {"boi_token_index": "boi_token", "eoi_token_index": "eoi_token", "image_token_id": "image_token"}
    config = hf.Gemma3Config(
        text_config=text,
        vision_config={**SIGLIP, "image_size": 32, "patch_size": 8, "vision_use_head": False},
        mm_tokens_per_image=4,
        **{key: tokenizer.convert_tokens_to_ids(named[name]) for key, name in ids.items()},
    )
    return Parts(hf.Gemma3ForConditionalGeneration, config, processor)


FAMILIES: dict[str, Callable[[int], Parts]] = {
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
    "qwen2_5_omni": qwen2_5_omni,
    "qwen3_omni": qwen3_omni,
    "qwen2_audio": qwen2_audio,
    "smolvlm": smolvlm,
    "idefics3": idefics3,
    "gemma3": gemma3,
}


# Folders ----------------------------------------------------------------------------------------------------------


@functools.cache
def folder(name: str, groups: int = 1, layers: int = 2) -> Path:
    """The family's model folder, built once in a process and removed at its end; `groups` are its heads of keys,
    `layers` the decoder's."""
    path = Path(tempfile.mkdtemp(prefix=f"relax-gym-{name}-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    torch.manual_seed(0)
    parts = FAMILIES[name](1)
    text = parts.config.get_text_config()
    text.num_key_value_heads, text.num_hidden_layers = groups, layers
    model = parts.model(parts.config)
    for parameter in model.parameters():
        if not parameter.any() and parameter.dim() >= 2:  # what begins at 0 would hide the images
            torch.nn.init.normal_(parameter, std=0.2)
        elif parameter.dim() >= 2:
            parameter.data *= 4  # as they begin, such small models give all tokens about the same probability
    model.save_pretrained(path)
    parts.processor.save_pretrained(path)
    return path


@functools.cache
def processor(name: str, *, sound_in_video: bool = False) -> MediaProcessor:
    """The processor of the folder."""
    loaded = load_processor(folder(name))
    assert loaded is not None
    return MediaProcessor(loaded, sound_in_video=sound_in_video)


@functools.cache
def renderer(name: str, *, sound_in_video: bool = False) -> ChatRenderer:
    """The renderer with that processor."""
    return ChatRenderer(load_tokenizer(folder(name)), processor=processor(name, sound_in_video=sound_in_video))


def fresh_model(name: str) -> Any:
    """A new model with the folder's weights."""
    return load_language_model(folder(name), dtype=torch.float32).eval()


@functools.cache
def model(name: str) -> Any:
    """The model that plain forwards are computed with; nobody changes it."""
    return fresh_model(name).requires_grad_(False)
