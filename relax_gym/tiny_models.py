"""Models built in code, no download: a small Qwen3 with a character-level ChatML tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from relax_gym.config import Section, validate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TINY_QWEN3 = "tiny-qwen3"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PAD, IM_START, IM_END = range(3)
WORDS = ("system", "user", "assistant", "tool")
CHAT_TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string -%}{{ content }}
{%- elif content -%}{%- for part in content -%}{{ part['text'] }}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- macro call(function) -%}
<tool_call>{"name": "{{ function['name'] }}", "arguments": {{ function['arguments'] | tojson }}{{ '}' }}</tool_call>
{%- endmacro -%}
{%- if tools -%}
{{ '<|im_start|>system\\nTools:' }}{% for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}
{{- '\\nCall one with <tool_call>{"name": ..., "arguments": {...}}</tool_call>.<|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + text(message['content']) }}
{%- for tool_call in message['tool_calls'] or [] -%}{{ '\\n' + call(tool_call['function']) }}{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""


class TinyOptions(Section):
    """`[model.kwargs]` of `tiny-qwen3`."""

    hidden_size: int = Field(96, ge=8)
    num_layers: int = Field(3, ge=1)
    num_heads: int = Field(4, ge=1)
    num_kv_heads: int = Field(2, ge=1)
    init_scale: float = Field(
        3.0, gt=0, description="factor on the usual 0.02 init, which is far too small at this width to learn from"
    )
    max_positions: int = Field(1024, ge=16)
    seed: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _check_heads(self) -> TinyOptions:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}")
        return self

    def key(self) -> str:
        """Changes with anything that may change the bytes of the built model."""
        libraries = {name: version(name) for name in ("torch", "transformers", "tokenizers", "safetensors")}
        text = json.dumps([self.model_dump(), libraries, CHAT_TEMPLATE], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def tiny_options(kwargs: Mapping[str, Any]) -> TinyOptions:
    """Check `model.kwargs`. Raises ConfigError naming key, value and what is allowed."""
    return validate(TinyOptions, kwargs, source=TINY_QWEN3, prefix="model.kwargs")


def char_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each printable ASCII character, newline and role name; round-trips all of those."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = ["\n", *map(chr, range(32, 127))]
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *WORDS, *characters, "<unk>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(WORDS) + r"|[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped: PreTrainedTokenizerFast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=SPECIAL[IM_END],
        pad_token=SPECIAL[PAD],
        unk_token="<unk>",
        additional_special_tokens=[SPECIAL[IM_START]],
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def build_tiny_qwen3(options: TinyOptions, folder: Path) -> None:
    """Write model and tokenizer to `folder`. The same options give the same bytes; global random state is untouched."""
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = char_tokenizer()
    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        dtype="float32",
        vocab_size=len(tokenizer),
        hidden_size=options.hidden_size,
        intermediate_size=3 * options.hidden_size,
        num_hidden_layers=options.num_layers,
        num_attention_heads=options.num_heads,
        num_key_value_heads=options.num_kv_heads,
        head_dim=max(16, options.hidden_size // options.num_heads // 2 * 2),
        max_position_embeddings=options.max_positions,
        tie_word_embeddings=True,
        bos_token_id=IM_START,
        eos_token_id=IM_END,
        pad_token_id=PAD,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        weights = Qwen3ForCausalLM(config).state_dict()
    del weights["lm_head.weight"]  # tied to the embedding
    scaled = {name: w.float() * (options.init_scale if w.dim() >= 2 else 1.0) for name, w in weights.items()}
    save_file(scaled, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
