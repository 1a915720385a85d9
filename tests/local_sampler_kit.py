"""Tiny models, a tokenizer and the plain full forward that the local sampler is held against."""

from __future__ import annotations

import asyncio
import copy
import string
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from relax_gym.sampler import SamplingParams
from relax_gym.types import Completion
from relax_gym_plugins.samplers.local.engine import LocalEngine
from relax_gym_plugins.samplers.local.options import LocalSamplerOptions
from relax_gym_plugins.samplers.local.sampler import LocalSampler
from relax_gym_plugins.samplers.local.sampling import uniform

VOCABULARY = 97
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 8, "tie_word_embeddings": True}),
    "llama": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": False}),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM, {"head_dim": 8, "sliding_window": 8}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 8}),
}


def build(kind: str = "qwen3", seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    config, model, extra = KINDS[kind]
    built: PreTrainedModel = model(config(**SHAPE, **extra)).float().eval()
    return built


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each printable character."""
    vocabulary = {character: index for index, character in enumerate(string.printable[:VOCABULARY])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist()


def play(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run; a hang is a failure."""
    return asyncio.run(asyncio.wait_for(coroutine, 60))


@asynccontextmanager
async def serving(model: PreTrainedModel, **options: Any) -> AsyncIterator[LocalSampler]:
    sampler = LocalSampler.from_engine(
        LocalEngine(copy.deepcopy(model), build_tokenizer(), LocalSamplerOptions(dtype="float32", **options))
    )
    await sampler.start()
    try:
        yield sampler
    finally:
        await sampler.aclose()


async def complete(sampler: LocalSampler, ids: Sequence[int], **params: Any) -> Completion:
    session = sampler.open_session()
    try:
        return await session.generate(ids, SamplingParams(**{"max_new_tokens": 8, **params}))
    finally:
        session.close()


def await_tokens(sampler: LocalSampler, count: int) -> None:
    """Return once `count` tokens are sampled."""
    while count > 0:
        count -= int(sampler.metrics()["generated_tokens"])


@torch.no_grad()
def scores(model: PreTrainedModel, ids: Sequence[int], temperature: float = 1.0) -> np.ndarray[Any, Any]:
    """Log-probs [T, vocabulary] of a plain forward without any cache."""
    logits = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].double()
    return torch.log_softmax(logits / (temperature or 1.0), dim=-1).numpy()


def check_exact(
    model: PreTrainedModel, ids: Sequence[int], out: Completion, *, temperature: float = 1.0, seed: int = 0
) -> None:
    """Tokens and log-probs are those of a plain full forward and a plain inverse CDF."""
    table = scores(model, [*ids, *out.token_ids], temperature)
    for index, (token, logprob) in enumerate(zip(out.token_ids, out.logprobs, strict=True)):
        place = len(ids) + index
        row = table[place - 1]
        if temperature == 0:
            expected = int(row.argmax())
        else:
            number = uniform(np.array([seed], dtype=np.uint64), np.array([place], dtype=np.uint64))[0]
            expected = int(np.searchsorted(np.exp(row).cumsum(), number, side="right"))
        assert token == expected, f"token {index}"
        assert abs(logprob - row[token]) <= 1e-4
