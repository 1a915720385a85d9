"""What every sampler does. `Subject`s differ in what serves and in what model is behind it; the cases do not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from relax_gym.sampler import Sampler, SamplingParams
from relax_gym.types import Completion, FinishReason

Table = Callable[[int, list[int], float, Mapping[int, float]], NDArray[np.float64]]
"""(version, ids, temperature, logit bias) → log-probs of what follows each id, [T, vocabulary]."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A started sampler at version 0, and what it should say. `weights(v)` are those of version v."""

    sampler: Sampler
    table: Table
    weights: Callable[[int], list[tuple[str, torch.Tensor]]]
    tokenizer: PreTrainedTokenizerBase
    tolerance: float
    greedy: bool = True
    """Whether temperature 0 means anything to it."""

    async def ask(self, ids: list[int], **params: Any) -> Completion:
        session = self.sampler.open_session()
        try:
            return await session.generate(ids, SamplingParams(**{"max_new_tokens": 6, **params}))
        finally:
            session.close()

    def agrees(self, prompt: list[int], completion: Completion, **params: Any) -> bool:
        """Whether the log-probs are those of the weights that sampled each token."""
        ids = [*prompt, *completion.token_ids]
        for at, (id, logprob, version) in enumerate(
            zip(completion.token_ids, completion.logprobs, completion.versions, strict=True), start=len(prompt)
        ):
            table = self.table(version, ids[:at], params.get("temperature") or 1.0, params.get("logit_bias", {}))
            if abs(table[-1, id] - logprob) > self.tolerance:
                return False
        return True


PROMPT = [5, 17, 30, 8]


async def completions_are_whole_and_their_log_probs_right(subject: Subject) -> None:
    no_end = dict.fromkeys(subject.tokenizer.all_special_ids, -np.inf)
    completion = await subject.ask(PROMPT, logit_bias=no_end)
    assert len(completion.token_ids) == 6
    assert completion.finish_reason is FinishReason.LENGTH
    assert completion.versions == (0,) * 6
    assert subject.agrees(PROMPT, completion, logit_bias=no_end)


async def k35_k36_log_probs_are_at_the_temperature(subject: Subject) -> None:
    for temperature in (0.5, 1.7):
        completion = await subject.ask(PROMPT, temperature=temperature)
        assert subject.agrees(PROMPT, completion, temperature=temperature)


async def filters_do_not_change_log_probs(subject: Subject) -> None:
    completion = await subject.ask(PROMPT, top_k=2, top_p=0.9)
    assert subject.agrees(PROMPT, completion)


async def greedy_is_the_likeliest(subject: Subject) -> None:
    if not subject.greedy:
        pytest.skip("its model has one continuation")
    completion = await subject.ask(PROMPT, temperature=0.0)
    ids = [*PROMPT, *completion.token_ids]
    table = subject.table(0, ids, 1.0, {})[len(PROMPT) - 1 : -1]
    chosen = table[range(len(table)), list(completion.token_ids)]
    assert (table.max(-1) - chosen <= subject.tolerance).all()  # in bfloat16 the likeliest may be two
    assert subject.agrees(PROMPT, completion)


async def k44_biased_ids_are_never_sampled(subject: Subject) -> None:
    if not subject.greedy:
        pytest.skip("its model has one continuation")
    likeliest = subject.table(0, PROMPT, 1.0, {})[-1].argsort()[::-1][:3].tolist()
    bias = dict.fromkeys(likeliest, -np.inf)
    for completion in await asyncio.gather(*(subject.ask(PROMPT, logit_bias=bias) for _ in range(4))):
        assert not set(completion.token_ids) & set(likeliest)
        assert subject.agrees(PROMPT, completion, logit_bias=bias)


async def stop_ids_end_a_completion_and_stay_in_it(subject: Subject) -> None:
    whole = await subject.ask(PROMPT, temperature=0.0)
    stop = whole.token_ids[2]
    first = whole.token_ids.index(stop)
    completion = await subject.ask(PROMPT, temperature=0.0, stop_token_ids=(stop,))
    assert completion.token_ids == whole.token_ids[: first + 1]
    assert completion.finish_reason is FinishReason.STOP


async def stop_strings_end_a_completion_and_stay_in_it(subject: Subject) -> None:
    whole = await subject.ask(PROMPT, temperature=0.0)
    texts = [subject.tokenizer.decode(whole.token_ids[:end]) for end in range(7)]
    stop = texts[4][len(texts[2]) :]  # of two tokens
    first = next(end for end, text in enumerate(texts) if stop in text)
    completion = await subject.ask(PROMPT, temperature=0.0, stop=(stop,))
    assert completion.token_ids == whole.token_ids[:first]
    assert completion.finish_reason is FinishReason.STOP


async def turns_of_a_session_extend_each_other(subject: Subject) -> None:
    session, ids = subject.sampler.open_session(), list(PROMPT)
    for turn in range(3):
        completion = await session.generate(ids, SamplingParams(max_new_tokens=4))
        assert subject.agrees(ids, completion)
        ids += [*completion.token_ids, 9 + turn]
    session.close()
    session.close()


async def many_sessions_do_not_disturb_each_other(subject: Subject) -> None:
    prompts = [[5 + number, *PROMPT[: number % 4]] for number in range(12)]
    completions = await asyncio.gather(*(subject.ask(prompt) for prompt in prompts))
    assert all(subject.agrees(prompt, found) for prompt, found in zip(prompts, completions, strict=True))


async def k39_new_weights_are_used_at_once_and_named(subject: Subject) -> None:
    session = subject.sampler.open_session()
    await session.generate(PROMPT, SamplingParams(max_new_tokens=4))
    for version in (1, 2):
        await subject.sampler.update_weights(subject.weights(version), version)
        assert subject.sampler.version == version
        completion = await session.generate(PROMPT, SamplingParams(max_new_tokens=4))
        assert completion.versions == (version,) * len(completion.token_ids)
        assert subject.agrees(PROMPT, completion)
    session.close()
    await subject.sampler.update_weights(subject.weights(0), 0)


async def cancelled_requests_leave_nothing_behind(subject: Subject) -> None:
    session = subject.sampler.open_session()
    task = asyncio.ensure_future(session.generate(PROMPT, SamplingParams(max_new_tokens=100)))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    completion = await session.generate(PROMPT, SamplingParams(max_new_tokens=4))
    assert subject.agrees(PROMPT, completion)
    session.close()


CASES = [
    completions_are_whole_and_their_log_probs_right,
    k35_k36_log_probs_are_at_the_temperature,
    filters_do_not_change_log_probs,
    greedy_is_the_likeliest,
    k44_biased_ids_are_never_sampled,
    stop_ids_end_a_completion_and_stay_in_it,
    stop_strings_end_a_completion_and_stay_in_it,
    turns_of_a_session_extend_each_other,
    many_sessions_do_not_disturb_each_other,
    k39_new_weights_are_used_at_once_and_named,
    cancelled_requests_leave_nothing_behind,
]


class Reference:
    """Tables by plain forward passes of a `transformers` model, whose version v is its first weights times 1 + v/10.

    It computes in float32, with weights rounded to `dtype`.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> None:
        self.model, self.dtype = model.float().eval(), dtype
        self.first = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}

    def weights(self, version: int) -> list[tuple[str, torch.Tensor]]:
        """Of one version."""
        return [(name, (tensor * (1 + version / 10)).to(self.dtype)) for name, tensor in self.first.items()]

    @torch.no_grad()
    def table(self, version: int, ids: list[int], temperature: float, bias: Mapping[int, float]) -> NDArray[np.float64]:
        """See `Table`."""
        for name, tensor in self.weights(version):
            self.model.get_parameter(name).copy_(tensor)
        logits = self.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double()
        for id, value in bias.items():
            logits[:, id] += value
        found: NDArray[np.float64] = torch.log_softmax(logits / temperature, dim=-1).numpy()
        return found
