"""The local sampler's limits, aborts, crashes and closing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from local_sampler_kit import (
    SHAPE,
    await_tokens,
    build,
    check_exact,
    complete,
    play,
    prompt,
    serving,
)
from transformers import (
    Qwen3Config,
    Qwen3ForCausalLM,
)

from relax_gym.errors import SamplerError
from relax_gym.sampler import SamplingParams
from relax_gym.types import FinishReason


def test_the_context_ends_a_completion_with_length() -> None:
    async def run() -> None:
        async with serving(build(), max_context=24) as sampler:
            assert sampler.max_context == 24
            out = await complete(sampler, prompt(0, 20), max_new_tokens=50)
            assert (len(out.token_ids), out.finish_reason) == (4, FinishReason.LENGTH)
            out = await complete(sampler, prompt(0, 24), max_new_tokens=50)
            assert (out.token_ids, out.finish_reason) == ((), FinishReason.LENGTH)
            with pytest.raises(SamplerError, match=r"25 tokens; the local sampler takes 1 to 24"):
                await complete(sampler, prompt(0, 25))
            with pytest.raises(SamplerError, match=r"0 tokens"):
                await complete(sampler, [])
            with pytest.raises(SamplerError, match=r"token id 97 is not in the model's vocabulary of 97"):
                await complete(sampler, [3, 97])
            with pytest.raises(SamplerError, match=r"token id -1 is not"):
                await complete(sampler, [3], logit_bias={-1: 1.0})

    play(run())


def test_cancelling_aborts_the_request_and_the_session_goes_on() -> None:
    model = build()

    async def run() -> None:
        async with serving(model) as sampler:
            session = sampler.open_session()
            task = asyncio.create_task(session.generate(prompt(0, 5), SamplingParams(max_new_tokens=240)))
            await asyncio.to_thread(await_tokens, sampler, 3)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            out = await session.generate(prompt(0, 5), SamplingParams(max_new_tokens=5, seed=2))
            check_exact(model, prompt(0, 5), out, seed=2)
            session.close()

    play(run())


def test_closing_a_session_aborts_its_request_with_what_it_has() -> None:
    async def run() -> None:
        async with serving(build()) as sampler:
            session = sampler.open_session()
            task = asyncio.create_task(session.generate(prompt(0, 5), SamplingParams(max_new_tokens=240)))
            await asyncio.to_thread(await_tokens, sampler, 3)
            session.close()
            session.close()
            out = await task
            assert out.finish_reason is FinishReason.ABORT
            assert 3 <= len(out.token_ids) < 240
            with pytest.raises(SamplerError, match="the session is closed"):
                await session.generate(prompt(0, 5), SamplingParams(max_new_tokens=1))

    play(run())


def test_one_session_serves_one_request_at_a_time() -> None:
    async def run() -> None:
        async with serving(build()) as sampler:
            session = sampler.open_session()
            task = asyncio.create_task(session.generate(prompt(0, 5), SamplingParams(max_new_tokens=100)))
            await asyncio.sleep(0)
            with pytest.raises(SamplerError, match="already has a request in flight"):
                await session.generate(prompt(1, 5), SamplingParams(max_new_tokens=1))
            assert len((await task).token_ids) == 100

    play(run())


def test_a_crash_of_the_engine_fails_pending_and_later_requests() -> None:
    class Broken(Qwen3ForCausalLM):  # type: ignore[misc]
        def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
            if input_ids.shape[1] > 1:
                raise RuntimeError("the matrix is tired")
            return super().forward(input_ids=input_ids, **kwargs)

        forward.__signature__ = __import__("inspect").signature(Qwen3ForCausalLM.forward)  # type: ignore[attr-defined]

    async def run() -> None:
        model = Broken(Qwen3Config(**SHAPE, head_dim=8))
        async with serving(model) as sampler:
            jobs = [complete(sampler, prompt(i, 5)) for i in range(3)]
            outcomes = await asyncio.wait_for(asyncio.gather(*jobs, return_exceptions=True), 30)
            for outcome in [*outcomes, *await asyncio.gather(complete(sampler, [1, 2]), return_exceptions=True)]:
                assert isinstance(outcome, SamplerError)
                assert "RuntimeError: the matrix is tired" in str(outcome)
            with pytest.raises(SamplerError, match="the matrix is tired"):
                await sampler.update_weights(model.named_parameters(), 1)

    play(run())


def test_a_model_that_gives_nan_is_an_error_and_good_weights_heal_it() -> None:
    good = build()
    bad = {name: torch.full_like(tensor, float("nan")) for name, tensor in good.named_parameters()}

    async def run() -> None:
        async with serving(good) as sampler:
            await sampler.update_weights(bad.items(), 0)
            with pytest.raises(SamplerError, match="the model gives NaN"):
                await complete(sampler, prompt(0, 30))
            await sampler.update_weights(good.named_parameters(), 1)
            check_exact(good, prompt(0, 5), await complete(sampler, prompt(0, 5), seed=1), seed=1)

    play(run())


def test_closing_is_idempotent_and_fails_what_is_pending() -> None:
    async def run() -> None:
        async with serving(build()) as sampler:
            sampler.open_session()
            task = asyncio.create_task(complete(sampler, prompt(0, 5)))
            await asyncio.sleep(0.01)
            await sampler.aclose()
            await sampler.aclose()
            with pytest.raises(SamplerError, match="closed"):
                await asyncio.wait_for(task, 30)
            with pytest.raises(SamplerError, match="closed"):
                await complete(sampler, prompt(0, 5))

    play(run())


def test_memory_grows_with_use_only() -> None:
    async def run() -> None:
        async with serving(build(), max_slots=64) as sampler:
            pool = sampler.engine._runner.cache
            assert (pool.rows, pool.length) == (0, 0)
            await complete(sampler, prompt(0, 5))
            assert (pool.rows, pool.length) == (8, 64)
            await complete(sampler, prompt(0, 70))
            assert (pool.rows, pool.length) == (8, 128)

    play(run())
