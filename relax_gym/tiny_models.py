"""A language model built in code, no download: a small Qwen3 with a character-level ChatML tokenizer."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from relax_gym.section import Section

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast, ProcessorMixin

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

    @property
    def head_dim(self) -> int:
        """Of the language model's attention."""
        return max(16, self.hidden_size // self.num_heads // 2 * 2)

    def key(self) -> str:
        """Changes with anything that may change the bytes of the built model."""
        libraries = {name: version(name) for name in ("torch", "transformers", "tokenizers", "safetensors")}
        source = [Path(__file__).with_name(name).read_text() for name in ("tiny_models.py", "tiny_multimodal.py")]
        text = json.dumps([self.model_dump(), libraries, source], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def char_tokenizer(marks: Mapping[str, str] | None = None, **named: str) -> PreTrainedTokenizerFast:
    """One token for each printable ASCII character, newline and role name; round-trips all of those.

    `marks` are what the chat template writes for media, by the type of their part; the special tokens they consist of
    are in the vocabulary. `named` ones are attributes of the tokenizer too.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = ["\n", *map(chr, range(32, 127))]
    media = list(dict.fromkeys(re.findall(r"<\|\w+\|>", "".join((marks or {}).values()))))
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *media, *WORDS, *characters, "<unk>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(WORDS) + r"|[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped: PreTrainedTokenizerFast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=SPECIAL[IM_END],
        pad_token=SPECIAL[PAD],
        unk_token="<unk>",
        additional_special_tokens=[SPECIAL[IM_START], *(token for token in media if token not in named.values())],
        clean_up_tokenization_spaces=False,
        **({"extra_special_tokens": named} if named else {}),
    )
    wrapped.chat_template = chat_template(marks or {})
    return wrapped


def chat_template(marks: Mapping[str, str]) -> str:
    """CHAT_TEMPLATE that writes `marks` for the parts of their types."""
    text = "part['text']"
    return CHAT_TEMPLATE.replace(text, f"{dict(marks)!r}.get(part['type'], {text})") if marks else CHAT_TEMPLATE


def text_config(options: TinyOptions, vocabulary: int) -> dict[str, Any]:
    """What the configs of all language models built in code have in common."""
    return {
        "vocab_size": vocabulary,
        "hidden_size": options.hidden_size,
        "intermediate_size": 3 * options.hidden_size,
        "num_hidden_layers": options.num_layers,
        "num_attention_heads": options.num_heads,
        "num_key_value_heads": options.num_kv_heads,
        "max_position_embeddings": options.max_positions,
        "tie_word_embeddings": True,
        "bos_token_id": IM_START,
        "eos_token_id": IM_END,
        "pad_token_id": PAD,
    }


def build_tiny_qwen3(options: TinyOptions, folder: Path) -> None:
    """Write model and tokenizer to `folder`. The same options give the same bytes; global random state is untouched."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = char_tokenizer()
    config = Qwen3Config(**text_config(options, len(tokenizer)), head_dim=options.head_dim)
    write_model(lambda: Qwen3ForCausalLM(config), tokenizer, options, folder)


def write_model(
    build: Callable[[], PreTrainedModel],
    reader: PreTrainedTokenizerFast | ProcessorMixin,
    options: TinyOptions,
    folder: Path,
) -> None:
    """Save the model, its matrices scaled by `options.init_scale`, and its tokenizer or processor."""
    import torch
    from transformers.utils import logging

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(options.seed)
        model = build().float()
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter *= options.init_scale
    logging.disable_progress_bar()  # it is over before it is seen
    model.save_pretrained(folder)
    reader.save_pretrained(folder)
