"""Weight updates of servers that requests keep busy, fail or leave, each against scripted servers. No test reads the
clock."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from fake_sglang import FakeSGLang
from recording_sglang import Recording, ask, held
from test_sglang_sampler import PROMPT, WEIGHTS, expected, using

from relax_gym.errors import ConfigError, SamplerError
from relax_gym_plugins.samplers.sglang.fleet import State
from relax_gym_plugins.samplers.sglang.sampler import SGLangSampler


def test_servers_that_die_of_retracting_are_not_asked_to(tmp_path: Path) -> None:
    old, new = Recording(version="0.5.20", update_session=False), Recording()
    using([old, new], ask, tmp_path, on_update="retract")
    modes = [[body["mode"] for name, body in server.told if name == "pause_generation"] for server in (old, new)]
    assert modes == [["abort"], ["retract"]]


def test_k39_caches_are_flushed_unless_requests_stay_in_them(tmp_path: Path) -> None:
    """A server that is paused in place with requests refuses to flush; new requests then have a cache of their own."""
    server = Recording()

    async def use(sampler: SGLangSampler) -> None:
        task = await held(server, sampler)
        await sampler.update_weights(WEIGHTS, 1)
        await server.go()
        await task
        await ask(sampler)
        await sampler.update_weights(WEIGHTS, 2)

    using([server], use, tmp_path, on_update="keep")
    flushed = [body["flush_cache"] for name, body in server.told if name == "update_weights_from_disk"]
    assert flushed == [True, False, True]
    assert [body["extra_key"] for body in server.bodies] == ["0", "1"]


def test_k106_a_server_that_leaves_during_an_update_is_not_left_paused(tmp_path: Path) -> None:
    servers = [Recording(held_back=""), FakeSGLang()]
    first = servers[0]
    assert isinstance(first, Recording)

    async def use(sampler: SGLangSampler) -> Any:
        task = await held(first, sampler)
        first.held_back = "pause_generation"
        update = asyncio.ensure_future(sampler.update_weights(WEIGHTS, 1))
        await first.reached.wait()
        removal = asyncio.ensure_future(sampler.remove_engine(sampler.fleet.members[0]))
        await asyncio.sleep(0)
        first.gate.set()
        await update
        await first.go()
        await removal
        return await task

    assert len(using(servers, use, tmp_path, on_update="keep").token_ids) == 3


@pytest.mark.parametrize("on_update", ["keep", "retract"])
def test_k107_a_server_that_failed_an_update_is_empty_before_it_gets_the_weights(
    on_update: str, tmp_path: Path
) -> None:
    server = Recording()

    async def use(sampler: SGLangSampler) -> Any:
        task = await held(server, sampler, length=4, tokens=2)
        server.told.clear()
        server.control_faults["update_weights_from_disk"] = [400]
        update = asyncio.ensure_future(sampler.update_weights(WEIGHTS, 1))
        await update
        await server.go()
        return await task

    completion = using([server], use, tmp_path, on_update=on_update)
    # What the server had sampled is not used: it may have held weights of two versions.
    assert completion.versions == (1,) * 4
    assert list(completion.token_ids) == expected(PROMPT, 4, [1] * 4)
    calls = [(name, body.get("mode")) for name, body in server.told]
    assert calls == [
        ("pause_generation", "in_place" if on_update == "keep" else "retract"),
        ("update_weights_from_disk", None),
        ("continue_generation", None),
        ("pause_generation", "abort"),
        ("update_weights_from_disk", None),
        ("continue_generation", None),
    ]


def test_k107_a_cancelled_update_leaves_no_server_with_weights_of_two_versions(tmp_path: Path) -> None:
    server = Recording()

    async def use(sampler: SGLangSampler) -> Any:
        server.held_back = "update_weights_from_disk"
        update = asyncio.ensure_future(sampler.update_weights(WEIGHTS, 1))
        await server.reached.wait()
        update.cancel()
        await asyncio.gather(update, return_exceptions=True)
        server.gate.set()
        completion = await ask(sampler)
        return completion, sampler.metrics().get("failures", 0)

    completion, failures = using([server], use, tmp_path)
    assert (completion.versions, failures) == ((0,) * 3, 0)


def test_colocated_servers_have_their_memory_again_after_a_failed_update(tmp_path: Path) -> None:
    server = Recording()

    async def use(sampler: SGLangSampler) -> Any:
        await sampler.rest()
        server.told.clear()
        server.control_faults["update_weights_from_disk"] = [400]
        await sampler.update_weights(WEIGHTS, 1)
        return await ask(sampler)

    assert using([server], use, tmp_path, colocate=True).versions == (1, 1, 1)
    resumed = [body["tags"] for name, body in server.told if name == "resume_memory_occupation"]
    assert resumed == [["weights"], ["kv_cache"]]


def test_memory_is_freed_only_when_cancelled_requests_have_ended(tmp_path: Path) -> None:
    server = Recording()

    async def use(sampler: SGLangSampler) -> list[State]:
        server.slow_abort = True
        task = await held(server, sampler)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await sampler.rest()
        return [member.state for member in sampler.fleet.members]

    assert using([server], use, tmp_path, colocate=True) == [State.SERVING]


def test_k109_weights_are_computed_off_the_loop(tmp_path: Path) -> None:
    ran_in_loop: list[bool] = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        ran_in_loop.append(asyncio._get_running_loop() is not None)
        yield from WEIGHTS

    async def use(sampler: SGLangSampler) -> None:
        await sampler.update_weights(weights(), 1)

    using([FakeSGLang()], use, tmp_path)
    assert ran_in_loop == [False]


def test_k108_an_update_that_broke_off_is_given_to_no_server(tmp_path: Path) -> None:
    """What is kept for servers that join is then of two versions."""
    servers = [FakeSGLang(), FakeSGLang()]

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield from WEIGHTS
        raise RuntimeError("the learner has ended")

    async def use(sampler: SGLangSampler) -> None:
        url = sampler.fleet.members[1].engine.url
        await sampler.remove_engine(sampler.fleet.members[1])
        with pytest.raises(RuntimeError, match="the learner has ended"):
            await sampler.update_weights(weights(), 1)
        with pytest.raises(SamplerError, match="the last update of weights broke off"):
            await sampler.add_engine(url)

    using(servers, use, tmp_path)


def test_a_model_without_experts_cannot_have_them_recorded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="qwen3 has no experts to record"):
        using([FakeSGLang()], ask, tmp_path, routed_experts=True)


def test_requests_that_an_update_ends_have_ended_before_the_server_is_paused(tmp_path: Path) -> None:
    """One that is told to pause by ending requests looks whether they have, sleeps for a second, and looks again."""
    server = Recording()

    async def use(sampler: SGLangSampler) -> Any:
        tasks = [await held(server, sampler, length=4, tokens=2) for _ in range(3)]
        server.running_when_told.clear()
        await sampler.update_weights(WEIGHTS, 1)
        await server.go()
        return await asyncio.gather(*tasks)

    completions = using([server], use, tmp_path, on_update="abort")
    assert [completion.versions for completion in completions] == [(0, 0, 1, 1)] * 3
    assert server.running_when_told[:2] == [("abort_request", 3), ("pause_generation", 0)]


def test_a_server_that_an_update_takes_out_shows_as_an_outage(tmp_path: Path) -> None:
    servers = [Recording(), Recording()]

    async def use(sampler: SGLangSampler) -> list[float]:
        sampler.metrics()
        servers[0].control_faults["update_weights_from_disk"] = [500]
        await sampler.update_weights(WEIGHTS, 1)
        await sampler.fleet.settled()  # a server that is back again does not hide that it was out
        return [sampler.metrics()["outages"] for _ in range(2)]

    assert using(servers, use, tmp_path) == [1, 0]


def test_a_server_that_fails_to_end_requests_is_told_so_once(tmp_path: Path) -> None:
    server = Recording()

    async def use(sampler: SGLangSampler) -> Any:
        task = await held(server, sampler)
        server.told.clear()
        server.control_faults["abort_request"] = [500]
        await sampler.update_weights(WEIGHTS, 1)
        await server.go()
        return await task

    assert using([server], use, tmp_path, on_update="abort").versions == (1, 1, 1)
    assert [name for name, _ in server.told].count("abort_request") == 1


class Deaf(Recording):
    async def _control(self, http: web.Request) -> web.Response:
        if http.match_info["control"] == "abort_request":
            return web.json_response({})
        return await super()._control(http)


def test_a_server_that_ends_no_request_when_told_is_paused_all_the_same(tmp_path: Path) -> None:
    server = Deaf()

    async def use(sampler: SGLangSampler) -> Any:
        task = await held(server, sampler)
        await sampler.update_weights(WEIGHTS, 1)
        await server.go()
        return await task

    assert using([server], use, tmp_path, on_update="abort").versions == (0, 1, 1)
