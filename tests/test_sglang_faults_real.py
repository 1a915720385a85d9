"""Real SGLang servers that break, stall or are asked for too much: the run says so, and never trains on it."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang_kit import CPU_ARGUMENTS, CPU_ENVIRONMENT, attached, changed, context_of, processes, sglang_python
from test_sglang_process import all_gone, comes_true

from relax_gym.errors import SamplerError
from relax_gym.sampler import SamplingParams
from relax_gym_plugins.samplers.sglang import process
from relax_gym_plugins.samplers.sglang.engine import EngineError
from relax_gym_plugins.samplers.sglang.fleet import State
from relax_gym_plugins.samplers.sglang.options import SGLangSamplerOptions
from relax_gym_plugins.samplers.sglang.process import ServerProcess
from relax_gym_plugins.samplers.sglang.sampler import SGLangSampler

pytest_plugins = ["sglang_fixtures"]
pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("one_thread")]

PROMPT = [5, 20, 33, 47]
NO_END = dict.fromkeys((0, 1, 2), -math.inf)  # the special ids
LONG = SamplingParams(max_new_tokens=100, logit_bias=NO_END)


def using(sampler: SGLangSampler, use: Callable[[SGLangSampler], Awaitable[None]], model: Path) -> None:
    """Start a sampler, give its servers the model's own weights as version 0, and use it."""

    async def run() -> None:
        try:
            await sampler.start()
            await sampler.update_weights(changed(model, 0).named_parameters(), 0)
            await use(sampler)
        finally:
            await sampler.aclose()

    asyncio.run(asyncio.wait_for(run(), 200))


def send_signal(number: signal.Signals, pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, number)


async def in_the_server(sampler: SGLangSampler) -> None:
    """Wait until a request is there."""
    (member,) = sampler.fleet.members
    for _ in range(500):
        if await member.engine.running():
            return
        await asyncio.sleep(0.02)
    pytest.fail("no request came")


def test_k85_weights_that_are_no_numbers(lent_server: ServerProcess, tiny_qwen3: Path, tmp_path: Path) -> None:
    async def use(sampler: SGLangSampler) -> None:
        broken = [(name, tensor * math.nan) for name, tensor in changed(tiny_qwen3, 0).named_parameters()]
        await sampler.update_weights(broken, 1)
        with pytest.raises(
            SamplerError, match=f"{lent_server.url}: the log-prob of token 0 is None, not a number below 0"
        ):
            await sampler.open_session().generate(PROMPT, SamplingParams(max_new_tokens=4))
        await sampler.update_weights(changed(tiny_qwen3, 0).named_parameters(), 2)
        completion = await sampler.open_session().generate(PROMPT, SamplingParams(max_new_tokens=4, logit_bias=NO_END))
        assert completion.versions == (2,) * 4

    using(attached(lent_server, tiny_qwen3, tmp_path, sync="ipc", retries=1), use, tiny_qwen3)


def test_what_is_too_long_is_refused_at_once(lent_server: ServerProcess, tiny_qwen3: Path, tmp_path: Path) -> None:
    async def use(sampler: SGLangSampler) -> None:
        session, limit = sampler.open_session(), sampler.max_context
        completion = await session.generate([7] * (limit - 2), SamplingParams(max_new_tokens=2, logit_bias=NO_END))
        assert len(completion.token_ids) == 2
        with pytest.raises(SamplerError, match=rf"are {limit + 1}; the servers take {limit}"):
            await session.generate([7] * (limit - 1), SamplingParams(max_new_tokens=2))
        engine = sampler.fleet.members[0].engine
        with pytest.raises(EngineError, match=f"{engine.url}/generate answered 400: .*longer") as refusal:
            body: dict[str, Any] = {"input_ids": [7] * 9000, "sampling_params": {"max_new_tokens": 2}}
            await engine.generate(body, timeout=60)
        assert refusal.value.refused

    using(attached(lent_server, tiny_qwen3, tmp_path, sync="ipc"), use, tiny_qwen3)


def test_requests_that_do_not_fit_together_wait_their_turn(
    lent_server: ServerProcess, tiny_qwen3: Path, tmp_path: Path
) -> None:
    """Their keys and values are more than the server has room for: some wait in its queue, which nobody notices."""
    prompts = [[5 + number, *range(20, 100)] * 8 for number in range(12)]
    model = changed(tiny_qwen3, 0)

    @torch.no_grad()
    def logprobs(prompt: list[int], ids: tuple[int, ...]) -> torch.Tensor:
        logits = model(torch.tensor([[*prompt, *ids[:-1]]])).logits[0, len(prompt) - 1 :]
        logits[:, list(NO_END)] = -math.inf
        return logits.log_softmax(-1)[range(len(ids)), list(ids)]

    async def use(sampler: SGLangSampler) -> None:
        assert (
            12 * (len(prompts[0]) + LONG.max_new_tokens) > sampler.fleet.members[0].engine.info["max_total_num_tokens"]
        )
        sessions = [sampler.open_session() for _ in prompts]
        found = await asyncio.gather(*(s.generate(p, LONG) for s, p in zip(sessions, prompts, strict=True)))
        for prompt, completion in zip(prompts, found, strict=True):
            expected = logprobs(prompt, completion.token_ids)
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)
        assert "failures" not in sampler.metrics()

    using(attached(lent_server, tiny_qwen3, tmp_path, sync="ipc"), use, tiny_qwen3)


def test_k96_a_server_that_stalls_is_out_until_it_answers(
    lent_server: ServerProcess, tiny_qwen3: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pids = list(processes(lent_server.url))

    async def use(sampler: SGLangSampler) -> None:
        (member,) = sampler.fleet.members
        task = asyncio.ensure_future(sampler.open_session().generate(PROMPT, LONG))
        await in_the_server(sampler)
        send_signal(signal.SIGSTOP, pids)
        try:
            assert await comes_true(lambda: member.state is State.JOINING)
            assert not task.done()
        finally:
            send_signal(signal.SIGCONT, pids)
        completion = await task
        assert (len(completion.token_ids), set(completion.versions)) == (100, {0})
        assert await comes_true(lambda: member.in_flight == 0) and await member.engine.running() == 0

    sampler = attached(lent_server, tiny_qwen3, tmp_path, sync="ipc", request_timeout=5)
    with caplog.at_level(logging.INFO, "relax_gym_plugins"):
        using(sampler, use, tiny_qwen3)
    said = [record.getMessage() for record in caplog.records]
    assert f"SGLang server {lent_server.url} is out: {lent_server.url}/generate did not answer within 5 s" in said
    assert said[-1] == f"SGLang server {lent_server.url} serves again"


def test_k110_when_a_stalled_server_cannot_be_launched_again_the_error_says_why(
    tiny_qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sglang_python()} "$@"\n')
    python.chmod(0o700)
    options = SGLangSamplerOptions(
        python=str(python), server_args=CPU_ARGUMENTS, env=CPU_ENVIRONMENT, request_timeout=5
    )

    async def use(sampler: SGLangSampler) -> None:
        url, log = sampler.fleet.members[0].engine.url, tmp_path / "sglang/server-0.log"
        task = asyncio.ensure_future(sampler.open_session().generate(PROMPT, LONG))
        await in_the_server(sampler)
        python.write_text("#!/bin/sh\necho no CUDA device is left\nexit 1\n")
        monkeypatch.setattr(process, "GRACE_SECONDS", 1.0)
        pids = list(processes(url))
        send_signal(signal.SIGSTOP, pids)
        with pytest.raises(SamplerError, match=rf"no SGLang server is left: {url}: (.*\n)*.*no CUDA device") as error:
            await task
        assert str(log) in str(error.value)
        assert await all_gone(pids)

    using(SGLangSampler(context_of(tiny_qwen3, tmp_path), options), use, tiny_qwen3)
