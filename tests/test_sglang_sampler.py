"""The SGLang sampler against scripted servers: routing, failures, weight updates, budgets. No test reads the clock."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_sglang import FakeSGLang, next_token

from relax_gym.config import RunConfig
from relax_gym.context import RunContext
from relax_gym.errors import SamplerError
from relax_gym.models import load_tokenizer, resolve_model
from relax_gym.sampler import SamplingParams
from relax_gym.types import FinishReason
from relax_gym_plugins.samplers.sglang.options import SGLangSamplerOptions
from relax_gym_plugins.samplers.sglang.sampler import SGLangSampler

WEIGHTS = [("model.norm.weight", torch.ones(8))]
PROMPT = [3, 1, 4]


def config() -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"name": "tiny-qwen3", "kwargs": {"hidden_size": 32, "num_heads": 2, "num_kv_heads": 1}},
            "env": [{"id": "test/None-v0"}],
            "algorithm": {"name": "grpo"},
            "sampler": {"name": "sglang"},
            "train": {"steps": 1, "groups_per_step": 1, "group_size": 2},
        }
    )


Use = Callable[[SGLangSampler], Awaitable[Any]]


def using(servers: list[FakeSGLang], use: Use, folder: Path, *, version: int | None = 0, **options: Any) -> Any:
    """Start the servers and a sampler attached to them, send weights once, and use it."""

    async def run() -> Any:
        async with AsyncExitStack() as stack:
            for server in servers:
                await stack.enter_async_context(server.serving())
            given = config()
            path = resolve_model(given.model)
            context = RunContext(config=given, run_dir=folder, model_path=path, tokenizer=load_tokenizer(path))
            urls = [server.url for server in servers]
            sampler = SGLangSampler(context, SGLangSamplerOptions(urls=tuple(urls), sync="disk", **options))
            stack.push_async_callback(sampler.aclose)
            await sampler.start()
            if version is not None:
                await sampler.update_weights(WEIGHTS, version)
            return await use(sampler)

    return asyncio.run(asyncio.wait_for(run(), 60))


def expected(prompt: list[int], length: int, versions: list[int] | None = None) -> list[int]:
    ids = list(prompt)
    for at in range(length):
        ids.append(next_token(str((versions or [0] * length)[at]), ids))
    return ids[len(prompt) :]


# Requests ---------------------------------------------------------------------------------------------------------


def test_a_completion_is_what_the_server_sampled(tmp_path: Path) -> None:
    server = FakeSGLang()

    async def use(sampler: SGLangSampler) -> Any:
        return await sampler.open_session().generate(PROMPT, SamplingParams(max_new_tokens=5, temperature=0.5))

    completion = using([server], use, tmp_path)
    assert list(completion.token_ids) == expected(PROMPT, 5)
    assert completion.logprobs == tuple(-0.01 * (id + 1) for id in completion.token_ids)
    assert completion.versions == (0,) * 5
    assert completion.finish_reason is FinishReason.LENGTH
    (body,) = server.bodies
    assert body["input_ids"] == PROMPT and body["return_logprob"] and body["sampling_params"]["temperature"] == 0.5
    assert "top_logprobs_num" not in body
    assert len(body["rid"]) == 32


def test_the_capacity_is_that_of_the_servers_that_serve(tmp_path: Path) -> None:
    async def use(sampler: SGLangSampler) -> list[int | None]:
        both = sampler.capacity
        await sampler.remove_engine(sampler.fleet.members[0])
        one = sampler.capacity
        sampler.fleet.serving[0].engine.info.pop("max_total_num_tokens")
        return [both, one, sampler.capacity]

    assert using([FakeSGLang(), FakeSGLang()], use, tmp_path) == [10_000, 5_000, None]


def test_requests_that_no_server_can_take_are_refused_here(tmp_path: Path) -> None:
    server = FakeSGLang()

    async def use(sampler: SGLangSampler) -> None:
        session = sampler.open_session()
        with pytest.raises(SamplerError, match=r"ids below \d+, at least one; got \[3, 1000000\]"):
            await session.generate([3, 10**6], SamplingParams(max_new_tokens=5))
        with pytest.raises(
            SamplerError, match="3 prompt tokens and max_new_tokens = 998 are 1001; the servers take 1000"
        ):
            await session.generate(PROMPT, SamplingParams(max_new_tokens=998))

    using([server], use, tmp_path)
    assert not server.bodies


def test_k86_sessions_spread_and_stay_where_they_are(tmp_path: Path) -> None:
    servers = [FakeSGLang() for _ in range(3)]

    async def use(sampler: SGLangSampler) -> None:
        sessions = [sampler.open_session() for _ in range(6)]
        for turn in range(2):
            await asyncio.gather(*(s.generate([*PROMPT, turn], SamplingParams(max_new_tokens=2)) for s in sessions))

    using(servers, use, tmp_path)
    for server in servers:
        asked = [body["input_ids"][-1] for body in server.bodies]
        assert asked == [0, 0, 1, 1]


# Failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [500, 503, "drop", {"meta_info.output_token_logprobs": None}, {"output_ids": [1]}, {"meta_info.prompt_tokens": 9}],
    ids=str,
)
def test_k85_failed_requests_are_sent_again_and_counters_do_not_leak(fault: Any, tmp_path: Path) -> None:
    servers = [FakeSGLang(), FakeSGLang()]
    servers[0].faults = [fault]

    async def use(sampler: SGLangSampler) -> Any:
        completion = await sampler.open_session().generate(PROMPT, SamplingParams(max_new_tokens=3))
        return completion, [member.in_flight for member in sampler.fleet.members], sampler.metrics()

    completion, in_flight, metrics = using(servers, use, tmp_path)
    assert list(completion.token_ids) == expected(PROMPT, 3)
    assert in_flight == [0, 0]
    assert metrics["failures"] == 1 and metrics["requests"] == 1


@pytest.mark.parametrize(
    ("fault", "said"), [(500, "/generate answered 500"), ({"meta_info.prompt_tokens": 9}, ": the server read 9 prompt")]
)
def test_a_server_that_always_fails_ends_with_its_name(fault: Any, said: str, tmp_path: Path) -> None:
    server = FakeSGLang()
    server.faults = [fault] * 20

    async def use(sampler: SGLangSampler) -> None:
        with pytest.raises(SamplerError, match=f"a request failed 4 times, the last time: {server.url}{said}"):
            await sampler.open_session().generate(PROMPT, SamplingParams(max_new_tokens=3))

    using([server], use, tmp_path)


def test_bad_requests_are_not_repeated(tmp_path: Path) -> None:
    server = FakeSGLang()
    server.faults = [400]

    async def use(sampler: SGLangSampler) -> None:
        with pytest.raises(SamplerError, match="answered 400"):
            await sampler.open_session().generate(PROMPT, SamplingParams(max_new_tokens=3))

    using([server], use, tmp_path)
    assert len(server.bodies) == 1


def test_k96_a_server_that_hangs_is_left_for_another(tmp_path: Path) -> None:
    servers = [FakeSGLang(), FakeSGLang()]
    servers[0].faults = ["hang"]

    async def use(sampler: SGLangSampler) -> Any:
        return await sampler.open_session().generate(PROMPT, SamplingParams(max_new_tokens=3))

    completion = using(servers, use, tmp_path, request_timeout=1.5)
    assert list(completion.token_ids) == expected(PROMPT, 3)
    assert len(servers[1].bodies) == 1


def test_cancelling_aborts_the_request(tmp_path: Path) -> None:
    server = FakeSGLang()

    async def use(sampler: SGLangSampler) -> None:
        server.hold = 2
        task = asyncio.ensure_future(sampler.open_session().generate(PROMPT, SamplingParams(max_new_tokens=3)))
        await server.until(running=1, tokens=2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await server.until_idle()
        assert [member.in_flight for member in sampler.fleet.members] == [0]

    using([server], use, tmp_path)
    assert "abort_request" in server.calls


# Weight updates ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("held", [0, 2, 4])
def test_requests_in_flight_go_on_with_what_is_left_of_their_budget(held: int, tmp_path: Path) -> None:
    server = FakeSGLang()

    async def use(sampler: SGLangSampler) -> Any:
        server.hold = held
        task = asyncio.ensure_future(sampler.open_session().generate(PROMPT, SamplingParams(max_new_tokens=6)))
        await server.until(running=1, tokens=held)
        server.hold = 0
        for version in (1, 2, 3):  # two of them abort before a single token
            await sampler.update_weights(WEIGHTS, version)
            if version < 3:
                await server.until(running=1)
        await server.go()
        return await task

    completion = using([server], use, tmp_path)
    versions = [0] * held + [3] * (6 - held)
    assert list(completion.versions) == versions
    assert list(completion.token_ids) == expected(PROMPT, 6, versions)
    assert completion.finish_reason is FinishReason.LENGTH
    assert [body["sampling_params"]["max_new_tokens"] for body in server.bodies] == [6] + [6 - held] * 3
    assert server.bodies[-1]["input_ids"] == PROMPT + expected(PROMPT, held, versions)


@pytest.mark.parametrize("mode", ["keep", "retract"])
def test_requests_in_flight_may_stay_in_the_server(mode: str, tmp_path: Path) -> None:
    server = FakeSGLang()

    async def use(sampler: SGLangSampler) -> Any:
        server.hold = 2
        task = asyncio.ensure_future(sampler.open_session().generate(PROMPT, SamplingParams(max_new_tokens=4)))
        await server.until(running=1, tokens=2)
        await sampler.update_weights(WEIGHTS, 1)
        await server.go()
        return await task

    completion = using([server], use, tmp_path, on_update=mode)
    assert completion.versions == (0, 0, 1, 1)
    assert len(server.bodies) == 1


def test_servers_without_spans_give_the_version_they_were_asked_at(tmp_path: Path) -> None:
    server = FakeSGLang(version="0.5.15", update_session=False, spans=False)

    async def use(sampler: SGLangSampler) -> Any:
        return await sampler.open_session().generate(PROMPT, SamplingParams(max_new_tokens=2))

    assert using([server], use, tmp_path, version=7).versions == (7, 7)


def test_k106_an_update_that_fails_leaves_nothing_paused(tmp_path: Path) -> None:
    servers = [FakeSGLang(), FakeSGLang()]

    async def use(sampler: SGLangSampler) -> Any:
        servers[0].control_faults["update_weights_from_disk"] = [400]
        await sampler.update_weights(WEIGHTS, 1)
        await sampler.fleet.settled()
        assert not any(server.paused for server in servers)
        return await sampler.open_session().generate(PROMPT, SamplingParams(max_new_tokens=2))

    completion = using(servers, use, tmp_path)
    assert completion.versions == (1, 1)


def test_k107_a_server_without_the_weights_gets_no_requests_until_it_has_them(tmp_path: Path) -> None:
    servers = [FakeSGLang(), FakeSGLang()]

    async def use(sampler: SGLangSampler) -> None:
        servers[0].control_faults["update_weights_from_disk"] = [400]
        await sampler.update_weights(WEIGHTS, 1)
        assert sampler.version == 1
        await sampler.fleet.settled()
        assert len(sampler.fleet.serving) == 2
        assert [server.weight_version for server in servers] == ["1", "1"]

    using(servers, use, tmp_path)


def test_k110_when_no_server_is_left_the_error_names_them(tmp_path: Path) -> None:
    server = FakeSGLang()

    async def use(sampler: SGLangSampler) -> None:
        server.control_faults["update_weights_from_disk"] = [400] * 9
        with pytest.raises(SamplerError, match=f"{server.url}.*update_weights_from_disk failed"):
            await sampler.update_weights(WEIGHTS, 1)
        with pytest.raises(SamplerError, match=f"no SGLang server is left: {server.url}"):
            await sampler.open_session().generate(PROMPT, SamplingParams(max_new_tokens=2))

    using([server], use, tmp_path)


def test_colocated_servers_have_no_memory_while_the_learner_trains(tmp_path: Path) -> None:
    server = FakeSGLang()

    async def use(sampler: SGLangSampler) -> Any:
        server.calls.clear()
        await sampler.rest()
        await sampler.rest()
        await sampler.update_weights(WEIGHTS, 1)
        return await sampler.open_session().generate(PROMPT, SamplingParams(max_new_tokens=2))

    assert using([server], use, tmp_path, colocate=True).versions == (1, 1)
    assert server.calls == [
        "flush_cache",
        "release_memory_occupation",
        "resume_memory_occupation",
        "pause_generation",
        "update_weights_from_disk",
        "resume_memory_occupation",
        "continue_generation",
    ]


def test_a_server_that_fails_an_update_once_is_waited_for(tmp_path: Path) -> None:
    server = FakeSGLang()

    async def use(sampler: SGLangSampler) -> Any:
        server.control_faults["update_weights_from_disk"] = [400]
        await sampler.update_weights(WEIGHTS, 1)
        return await sampler.open_session().generate(PROMPT, SamplingParams(max_new_tokens=2))

    assert using([server], use, tmp_path).versions == (1, 1)


def test_requests_that_somebody_else_aborts_again_and_again_are_an_error(tmp_path: Path) -> None:
    server = FakeSGLang()
    abort = {"type": "abort", "message": "Abort", "status_code": None}
    nothing = {"output_ids": [], "meta_info.output_token_logprobs": [], "meta_info.weight_versions": []}
    server.faults = [{"meta_info.finish_reason": abort, **nothing}] * 9

    async def use(sampler: SGLangSampler) -> None:
        with pytest.raises(SamplerError, match="aborted in the server 4 times, and not from here"):
            await sampler.open_session().generate(PROMPT, SamplingParams(max_new_tokens=9))

    using([server], use, tmp_path)


# Servers that come and go -----------------------------------------------------------------------------------------


def test_a_server_that_joins_has_the_weights_before_it_gets_requests(tmp_path: Path) -> None:
    first, second = FakeSGLang(), FakeSGLang()

    async def use(sampler: SGLangSampler) -> None:
        async with second.serving():
            await sampler.add_engine(second.url)
            assert second.weight_version == "0"
            sessions = [sampler.open_session() for _ in range(2)]
            await asyncio.gather(*(s.generate(PROMPT, SamplingParams(max_new_tokens=2)) for s in sessions))
            assert [len(server.bodies) for server in (first, second)] == [1, 1]
            await sampler.update_weights(WEIGHTS, 1)
            assert second.weight_version == "1"
            await sampler.aclose()

    using([first], use, tmp_path)


def test_a_server_that_leaves_finishes_what_it_has(tmp_path: Path) -> None:
    servers = [FakeSGLang(), FakeSGLang()]

    async def use(sampler: SGLangSampler) -> None:
        leaving = sampler.fleet.members[0]
        servers[0].hold = 1
        session = sampler.open_session()
        task = asyncio.ensure_future(session.generate(PROMPT, SamplingParams(max_new_tokens=3)))
        await servers[0].until(running=1, tokens=1)
        removal = asyncio.ensure_future(sampler.remove_engine(leaving))
        other = await sampler.open_session().generate(PROMPT, SamplingParams(max_new_tokens=3))
        assert list(other.token_ids) == expected(PROMPT, 3)
        assert not removal.done() and len(servers[0].bodies) == 1
        await servers[0].go()
        assert list((await task).token_ids) == expected(PROMPT, 3)
        await removal
        await session.generate(PROMPT, SamplingParams(max_new_tokens=3))
        assert [len(server.bodies) for server in servers] == [1, 2]

    using(servers, use, tmp_path)
