"""A GGUF file of a Llama model with a byte-level BPE → a Hugging Face folder with float32 weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from relax_gym.errors import ModelError

if TYPE_CHECKING:
    from gguf import GGUFReader
    from transformers import LlamaConfig, PreTrainedTokenizerFast

OUTER = {
    "token_embd": "model.embed_tokens.weight",
    "output_norm": "model.norm.weight",
    "output": "lm_head.weight",
}
INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL_TOKEN = 3


def convert_gguf(path: Path, folder: Path) -> None:
    """Write config, safetensors and tokenizer of the GGUF at `path` to `folder`.

    Raises:
        ModelError: the file is no GGUF, or holds something other than a Llama with a SmolLM-style tokenizer.
    """
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError, OSError) as error:
        raise ModelError(f"{path} is not a readable GGUF file: {error}") from error
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    _require(metadata, "general.architecture", "llama", path)
    _require(metadata, "tokenizer.ggml.pre", "smollm", path)
    weights = read_weights(reader, metadata)
    config = llama_config(metadata, tied="lm_head.weight" not in weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    _save_generation_config(config, folder)
    bpe_tokenizer(metadata).save_pretrained(folder)


def read_weights(reader: GGUFReader, metadata: Mapping[str, Any]) -> dict[str, NDArray[np.float32]]:
    """All tensors, dequantised to float32, under their Hugging Face names. Shapes are [out, in]."""
    from gguf.quants import dequantize

    heads = {
        "attn_q": int(metadata["llama.attention.head_count"]),
        "attn_k": int(metadata["llama.attention.head_count_kv"]),
    }
    weights: dict[str, NDArray[np.float32]] = {}
    for tensor in reader.tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(shape)
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            values = unpermute(values, heads[kind])
        weights[hugging_face_name(tensor.name)] = np.ascontiguousarray(values)
    return weights


def unpermute(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undo the row order GGUF gives to q and k: it interleaves the two halves of each head that rotary rotates."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def hugging_face_name(name: str) -> str:
    """`blk.0.attn_q.weight` → `model.layers.0.self_attn.q_proj.weight`. Raises ModelError for an unknown tensor."""
    parts = name.split(".")
    if len(parts) == 2 and parts[0] in OUTER:
        return OUTER[parts[0]]
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in INNER:
        return f"model.layers.{parts[1]}.{INNER[parts[2]]}.{parts[3]}"
    raise ModelError(f"GGUF tensor {name!r} has no place in a Llama model; known: {', '.join([*OUTER, *INNER])}")


def llama_config(metadata: Mapping[str, Any], *, tied: bool) -> LlamaConfig:
    """The model's shape, from the GGUF metadata."""
    from transformers import LlamaConfig

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="float32",
        vocab_size=len(metadata["tokenizer.ggml.tokens"]),
        hidden_size=int(metadata["llama.embedding_length"]),
        intermediate_size=int(metadata["llama.feed_forward_length"]),
        num_hidden_layers=int(metadata["llama.block_count"]),
        num_attention_heads=int(metadata["llama.attention.head_count"]),
        num_key_value_heads=int(metadata["llama.attention.head_count_kv"]),
        max_position_embeddings=int(metadata["llama.context_length"]),
        rms_norm_eps=float(metadata["llama.attention.layer_norm_rms_epsilon"]),
        rope_parameters={"rope_type": "default", "rope_theta": float(metadata["llama.rope.freq_base"])},
        tie_word_embeddings=tied,
        bos_token_id=int(metadata["tokenizer.ggml.bos_token_id"]),
        eos_token_id=int(metadata["tokenizer.ggml.eos_token_id"]),
        pad_token_id=int(metadata["tokenizer.ggml.padding_token_id"]),
    )


def bpe_tokenizer(metadata: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """The tokenizer, from the tokens and merges in the GGUF metadata, with its chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    special = [
        t for t, kind in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True) if kind == CONTROL_TOKEN
    ]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    named = {name: tokens[metadata[f"tokenizer.ggml.{key}_token_id"]] for name, key in _NAMED_TOKENS.items()}
    wrapped: PreTrainedTokenizerFast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        additional_special_tokens=[token for token in special if token not in named.values()],
        model_max_length=int(metadata["llama.context_length"]),
        clean_up_tokenization_spaces=False,
        **named,
    )
    wrapped.chat_template = metadata["tokenizer.chat_template"]
    return wrapped


_NAMED_TOKENS = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}


def _save_generation_config(config: LlamaConfig, folder: Path) -> None:
    from transformers import GenerationConfig

    GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    ).save_pretrained(folder)


def _require(metadata: Mapping[str, Any], key: str, expected: str, path: Path) -> None:
    if metadata.get(key) != expected:
        raise ModelError(f"{path} has {key} = {metadata.get(key)!r}; only {expected!r} can be converted")
