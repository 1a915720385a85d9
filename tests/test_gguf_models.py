"""GGUF files become folders with the numbers, names, tokenizer and config that they stand for."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from relax_gym.errors import ModelError
from relax_gym.gguf_models import convert_gguf, hugging_face_name, unpermute
from relax_gym.models import check_model, load_tokenizer

F32, Q4_1, Q8_0 = 0, 3, 8


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def gguf_bytes(metadata: dict[str, object], tensors: list[tuple[str, tuple[int, ...], int, bytes]]) -> bytes:
    """A GGUF version 3 file written by hand. Tensor sizes are in GGUF order, fastest first."""
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        if isinstance(value, str):
            out += text(key) + struct.pack("<I", 8) + text(value)
        elif isinstance(value, float):
            out += text(key) + struct.pack("<If", 6, value)
        elif isinstance(value, int):
            out += text(key) + struct.pack("<II", 4, value)
        elif isinstance(value, list) and isinstance(value[0], str):
            out += text(key) + struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
        elif isinstance(value, list):
            out += text(key) + struct.pack("<IIQ", 9, 5, len(value)) + struct.pack(f"<{len(value)}i", *value)
    data = b""
    for name, sizes, kind, content in tensors:
        out += text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, len(data))
        data += content + b"\0" * (-len(content) % 32)
    return out + b"\0" * (-len(out) % 32) + data


def q4_1_row(scale: float, minimum: float, low: int, high: int) -> bytes:
    """32 weights: the first 16 have quant `low`, the last 16 `high`."""
    return struct.pack("<ee", scale, minimum) + bytes([low | high << 4] * 16)


def q8_0_row(scale: float, values: range) -> bytes:
    return struct.pack("<e32b", scale, *values)


TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "h", "i", "Ġ", "1", "2", "hi"]
METADATA: dict[str, object] = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 32,
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 1,
    "llama.rope.freq_base": 100000.0,
    "llama.attention.layer_norm_rms_epsilon": 0.5,
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3, 3, 1, 1, 1, 1, 1, 1],
    "tokenizer.ggml.merges": ["h i"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}",
}


def tiny_gguf() -> bytes:
    square = b"".join(q4_1_row(1.0, float(row), 0, 0) for row in range(32))  # row r holds r everywhere
    half = b"".join(q4_1_row(1.0, float(row), 0, 0) for row in range(16))
    norm = struct.pack("<32f", *[1.0] * 32)
    embedding = q8_0_row(0.25, range(-16, 16)) + counting_rows(len(TOKENS) - 1)
    first = q4_1_row(0.5, -1.0, 1, 2) + square[20:]
    return gguf_bytes(
        METADATA,
        [
            ("token_embd.weight", (32, len(TOKENS)), Q8_0, embedding),
            ("output_norm.weight", (32,), F32, norm),
            ("blk.0.attn_norm.weight", (32,), F32, norm),
            ("blk.0.ffn_norm.weight", (32,), F32, norm),
            ("blk.0.attn_q.weight", (32, 32), Q4_1, square),
            ("blk.0.attn_k.weight", (32, 16), Q4_1, half),
            ("blk.0.attn_v.weight", (32, 16), Q4_1, half),
            ("blk.0.attn_output.weight", (32, 32), Q4_1, square),
            ("blk.0.ffn_gate.weight", (32, 32), Q4_1, first),
            ("blk.0.ffn_up.weight", (32, 32), Q4_1, square),
            ("blk.0.ffn_down.weight", (32, 32), Q4_1, square),
        ],
    )


def counting_rows(count: int) -> bytes:
    return q8_0_row(1.0, range(32)) * count


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    (folder / "model.gguf").write_bytes(tiny_gguf())
    convert_gguf(folder / "model.gguf", folder)
    return check_model(folder)


def test_gguf_blocks_become_the_numbers_they_stand_for(converted: Path) -> None:
    from safetensors.numpy import load_file

    weights = load_file(converted / "model.safetensors")
    gate = weights["model.layers.0.mlp.gate_proj.weight"]
    assert gate.dtype == np.float32 and gate.shape == (32, 32)
    assert gate[0].tolist() == [-0.5] * 16 + [0.0] * 16  # 1 * 0.5 - 1, then 2 * 0.5 - 1
    assert gate[5].tolist() == [5.0] * 32
    embedding = weights["model.embed_tokens.weight"]
    assert embedding[0].tolist() == [-4.0, -3.75, -3.5, -3.25, -3.0, -2.75, -2.5, -2.25, -2.0, -1.75, -1.5, -1.25] + [
        value / 4 for value in range(-4, 16)
    ]
    assert weights["model.norm.weight"].tolist() == [1.0] * 32


def test_gguf_query_and_key_rows_are_put_back(converted: Path) -> None:
    from safetensors.numpy import load_file

    weights = load_file(converted / "model.safetensors")
    back = [0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15]
    assert weights["model.layers.0.self_attn.k_proj.weight"][:, 0].tolist() == back
    assert weights["model.layers.0.self_attn.q_proj.weight"][:, 0].tolist() == back + [row + 16 for row in back]
    assert weights["model.layers.0.self_attn.v_proj.weight"][:, 0].tolist() == list(range(16))


def test_unpermute_undoes_the_interleaving_of_each_head() -> None:
    rows = np.array([[0.0], [2.0], [1.0], [3.0], [4.0], [6.0], [5.0], [7.0]], dtype=np.float32)
    assert unpermute(rows, heads=2)[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]


def test_gguf_folder_loads_with_its_tokenizer_and_config(converted: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(converted)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.rope_parameters == {"rope_type": "default", "rope_theta": 100000.0}
    assert (model.config.rms_norm_eps, model.generation_config.eos_token_id) == (0.5, 2)
    tokenizer = load_tokenizer(converted)
    assert tokenizer.encode("hi 12<|im_end|>") == [8, 5, 6, 7, 2]
    assert tokenizer.decode([8, 5, 6, 7, 2]) == "hi 12<|im_end|>"
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == (
        "<|im_end|>",
        "<|im_end|>",
        "<|im_start|>",
    )
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<|im_start|>hi<|im_end|>"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not a gguf file at all, really not", "is not a readable GGUF file"),
        (gguf_bytes({**METADATA, "general.architecture": "mamba"}, []), "general.architecture = 'mamba'; only 'llama'"),
        (gguf_bytes({**METADATA, "tokenizer.ggml.pre": "qwen2"}, []), "tokenizer.ggml.pre = 'qwen2'; only 'smollm'"),
    ],
)
def test_other_gguf_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        convert_gguf(path, tmp_path)


def test_gguf_tensor_names() -> None:
    assert hugging_face_name("blk.7.ffn_down.weight") == "model.layers.7.mlp.down_proj.weight"
    assert hugging_face_name("token_embd.weight") == "model.embed_tokens.weight"
    with pytest.raises(ModelError, match=r"'blk\.0\.ssm_in\.weight' has no place"):
        hugging_face_name("blk.0.ssm_in.weight")
