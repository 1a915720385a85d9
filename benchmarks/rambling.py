"""Episodes whose lengths are known before a token is sampled, on SGLang's own servers, for any model, a random one too.

What an answer costs must not depend on what the weights say. So `LengthsSampler` is the SGLang sampler in which each
answer has a number of tokens drawn from a log-normal distribution by its seed, which is the same in all modes, and
`Ramble` is an env of several turns that takes any text.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import relax_gym
from relax_gym.hookspecs import hookimpl
from relax_gym.plugins import plugins
from relax_gym.registry import Component
from relax_gym.sampler import SamplingParams, Session
from relax_gym.types import Completion, Message, Placed
from relax_gym_plugins.samplers.sglang.options import SGLangSamplerOptions
from relax_gym_plugins.samplers.sglang.sampler import SGLangSampler

Info = dict[str, Any]
ENV, SAMPLER = "benchmark/Ramble-v0", "sglang_lengths"
TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]\n{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
LETTERS = "abcdefghijklmnopqrstuvwxyz "


class Ramble(relax_gym.Env):
    """The reward of an answer is the share of its characters that have an even code: any model can learn some of it."""

    def __init__(self, turns: int = 3, prompt: int = 64) -> None:
        """`prompt` is in characters."""
        self._turns, self._prompt, self._left = turns, prompt, turns

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[list[Message], Info]:
        """A prompt of random letters."""
        super().reset(seed=seed)
        self._left = self._turns
        return relax_gym.user("".join(self.np_random.choice(list(LETTERS), self._prompt))), {}

    def step(self, action: str) -> relax_gym.StepResult:
        """The env wants more until it has enough."""
        self._left -= 1
        reward = sum(ord(character) % 2 == 0 for character in action) / max(1, len(action)) / self._turns
        return relax_gym.StepResult(relax_gym.user("go on"), reward, self._left == 0, False, {})


class LengthsOptions(SGLangSamplerOptions):
    """Those of the SGLang sampler, and how many tokens an answer has: log-normal, at most `rollout.max_new_tokens`."""

    median: float = Field(gt=0)
    sigma: float = Field(ge=0)
    ended_by_model: bool = Field(False, description="the model may end its answer before that")

    def length(self, seed: int) -> int:
        """Tokens of the answer with this seed."""
        normal = statistics.NormalDist().inv_cdf(np.random.default_rng(seed).uniform(1e-9, 1 - 1e-9))
        return max(1, round(self.median * math.exp(self.sigma * normal)))


class LengthsSampler(SGLangSampler):
    """The SGLang sampler, but for the lengths it is asked for."""

    options: LengthsOptions

    def open_session(self) -> Session:
        """See `Sampler.open_session`."""
        return _Lengths(super().open_session(), self.options)


class _Lengths(Session):
    def __init__(self, session: Session, options: LengthsOptions) -> None:
        self._session, self._options = session, options

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, media: Sequence[Placed] = ()
    ) -> Completion:
        assert params.seed is not None
        changes: dict[str, Any] = {"max_new_tokens": min(params.max_new_tokens, self._options.length(params.seed))}
        if not self._options.ended_by_model:
            changes["stop_token_ids"] = ()
        return await self._session.generate(prompt_ids, dataclasses.replace(params, **changes), media)

    def close(self) -> None:
        self._session.close()


class _Plugin:
    @hookimpl
    def register_envs(self) -> dict[str, Any]:
        return {ENV: Ramble}

    @hookimpl
    def register_samplers(self) -> dict[str, Component]:
        return {SAMPLER: Component(factory=LengthsSampler, options=LengthsOptions)}


def register() -> None:
    """Make env and sampler known in this process."""
    plugins().add(_Plugin(), "rambling", "benchmarks")


def write_tokenizer(size: int, folder: Path) -> None:
    """One token for each printable character, a word for each further id, nothing special: no token ends an answer."""
    characters = ["\n", *map(chr, range(32, 127))]
    words = {word: id for id, word in enumerate([*characters, *(f"<{id}>" for id in range(len(characters), size))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(folder)
