"""Small tokenizers, built in code, with the special tokens and the template semantics of the families people train.

`byte_tokenizer` knows bytes; `piece_tokenizer` works like SentencePiece: it marks spaces and adds one at the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from relax_gym.chat import ChatRenderer, Context, Conversation
from relax_gym.config import ChatConfig
from relax_gym.types import Message, Tool

TEMPLATES = Path(__file__).parent / "templates"

WEATHER: Tool = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}

# family: (kind of tokenizer, special tokens with bos and eos first where there are any)
FAMILIES: dict[str, tuple[str, dict[str, str], tuple[str, ...]]] = {
    "smollm2": ("bytes", {"eos": "<|im_end|>"}, ("<|im_start|>", "<|endoftext|>")),
    "qwen25": ("bytes", {"eos": "<|im_end|>"}, ("<|im_start|>", "<|endoftext|>")),
    "qwen3": ("bytes", {"eos": "<|im_end|>"}, ("<|im_start|>", "<|endoftext|>")),
    "llama3": (
        "bytes",
        {"bos": "<|begin_of_text|>", "eos": "<|eot_id|>"},
        ("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>"),
    ),
    "llama3_plain": (
        "bytes",
        {"bos": "<|begin_of_text|>", "eos": "<|end_of_text|>"},
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    "gemma": ("bytes", {"bos": "<bos>", "eos": "<eos>"}, ("<start_of_turn>", "<end_of_turn>")),
    "mistral": (
        "pieces",
        {"bos": "<s>", "eos": "</s>"},
        (
            *("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
            *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ),
    ),
    "deepseek_r1": (
        "bytes",
        {"bos": "<｜begin▁of▁sentence｜>", "eos": "<｜end▁of▁sentence｜>"},
        (
            "<｜User｜>",
            "<｜Assistant｜>",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁outputs▁begin｜>",
            "<｜tool▁outputs▁end｜>",
        ),
    ),
    "phi3": ("pieces", {"bos": "<s>", "eos": "<|endoftext|>"}, ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")),
    "parts": ("bytes", {"eos": "<|im_end|>"}, ("<|im_start|>",)),
    "plain": ("bytes", {"eos": "<eos>"}, ()),
    "glm": ("bytes", {"eos": "<|endoftext|>"}, ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>")),
}


def byte_tokenizer(merges: tuple[tuple[str, str], ...] = ()) -> Tokenizer:
    """One token for each byte, and one for each merge (of characters in the byte-level alphabet)."""
    vocab = {letter: id for id, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for first, second in merges:
        vocab[first + second] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def piece_tokenizer() -> Tokenizer:
    """One token for each printable ASCII character, bytes for all others, `▁` for a space, one added at the start."""
    letters = ["▁", *(chr(code) for code in range(33, 127)), *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {letter: id for id, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def tokenizer_of(family: str, *, merges: tuple[tuple[str, str], ...] = ()) -> PreTrainedTokenizerFast:
    """The tokenizer of a family, its template set. Those with a bos add it by themselves, as the real ones do."""
    kind, named, others = FAMILIES[family]
    backend = byte_tokenizer(merges) if kind == "bytes" else piece_tokenizer()
    specials = [*named.values(), *others]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in specials])
    tags = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in tags])
    if "bos" in named:
        bos = named["bos"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=named.get("bos"),
        eos_token=named["eos"],
        extra_special_tokens=list(others),
        name_or_path=family,
    )
    tokenizer.chat_template = (TEMPLATES / f"{family}.jinja").read_text(encoding="utf-8")
    return tokenizer


def renderer_of(family: str, **config: object) -> ChatRenderer:
    """A renderer for a family."""
    return ChatRenderer(tokenizer_of(family), ChatConfig.model_validate(config))


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def tool(text: str, **keys: str) -> Message:
    return {"role": "tool", "content": text, **keys}


Step = str | Sequence[Message]
THOUGHT = "<think>\nHm.\n</think>\n\n"


def play(
    renderer: ChatRenderer, steps: Sequence[Step], tools: Sequence[Tool] = ()
) -> tuple[Conversation, list[Context]]:
    """Observations as they are; strings are answers, sampled the way an expert's would be."""
    conversation, contexts = renderer.conversation(tools), []
    for step in steps:
        if isinstance(step, str):
            conversation.complete(renderer.encode_answer(step))
        else:
            contexts.append(conversation.observe(step))
    return conversation, contexts


def text_of(renderer: ChatRenderer, ids: Sequence[int]) -> str:
    return renderer.template.decode(ids)


def single_pass(renderer: ChatRenderer, steps: Sequence[Step], tools: Sequence[Tool] = ()) -> list[int]:
    """What the tokenizer makes of the whole conversation at once."""
    messages = [m for step in steps for m in ([assistant(step)] if isinstance(step, str) else step)]
    adapted = renderer.template.adapt(messages)
    return renderer.tokenizer.apply_chat_template(
        adapted,
        tools=list(tools) or None,
        chat_template=renderer.config.template,
        add_generation_prompt=True,
        return_dict=False,
        **renderer.config.template_kwargs,
    )


ONE: list[Step] = [[user("Hi")]]
TWO: list[Step] = [*ONE, "Yes.", [user("And?")]]
THREE: list[Step] = [*TWO, "No, 12\nor 3", [user("Ünïcode 漢 🙂")]]
RULES: list[Step] = [[system("Be brief."), user("Hi")], *THREE[1:]]
SHOTS: list[Step] = [[user("1+1"), assistant("2"), user("2+2")], "4", [user("Go on")]]
TOOL: list[Step] = [[user("Sun?")], "call", [tool("sun")], "It is sunny."]
TOOLS: list[Step] = [[user("Sun?")], "call", [tool("sun"), tool("rain")], "again", [tool("x")], "Both.", [user("Hm")]]

REST = "\n<|im_start|>user\nB<|im_end|>\n<|im_start|>assistant\n"

CALL: Message = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}],
}
