"""Known failures of samplers on servers, each against scripted servers. No test reads the clock."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from fake_sglang import FakeSGLang
from recording_sglang import Recording, ask
from test_sampler_conformance import make_context
from test_sglang_protocol import read, reply
from test_sglang_sampler import PROMPT, WEIGHTS, expected, using

from relax_gym.errors import ConfigError, SamplerError
from relax_gym.sampler import SamplingParams
from relax_gym.types import FinishReason
from relax_gym_plugins.samplers.sglang.engine import IDLE_SECONDS, Engine, _message, _socket_with_keepalive
from relax_gym_plugins.samplers.sglang.fleet import Fleet, Member, State
from relax_gym_plugins.samplers.sglang.options import SGLangSamplerOptions
from relax_gym_plugins.samplers.sglang.protocol import BadReply
from relax_gym_plugins.samplers.sglang.sampler import SGLangSampler
from relax_gym_plugins.samplers.sglang.servers import launch

# What a request may meet --------------------------------------------------------------------------------------------


def test_k30_tokens_of_a_request_aborted_in_the_queue_are_kept() -> None:
    """Servers do not say `prompt_tokens` of a request that was put back into the queue and aborted there."""
    abort = {"type": "abort", "message": "Abort in waiting queue"}
    piece = read(reply(finish_reason=abort, prompt_tokens=None))
    assert (piece.token_ids, piece.finish) == ((4, 5, 6), FinishReason.ABORT)
    # nor its experts, without which its tokens cannot be trained on
    assert read(reply(finish_reason=abort, prompt_tokens=None), experts=True).token_ids == ()
    with pytest.raises(BadReply, match="read None prompt tokens"):
        read(reply(prompt_tokens=None))


def test_k44_sampled_placeholders_never_reach_a_trajectory(tmp_path: Path) -> None:
    server = FakeSGLang()  # it pays no heed to biases

    async def use(sampler: SGLangSampler) -> None:
        forbidden = expected(PROMPT, 3)[1]
        with pytest.raises(SamplerError, match=f"sampled {forbidden}, which its logit bias rules out"):
            await ask(sampler, logit_bias={forbidden: -math.inf})

    using([server], use, tmp_path)


def test_k86_a_failed_request_goes_to_another_server(tmp_path: Path) -> None:
    servers = [FakeSGLang(), FakeSGLang()]
    servers[0].faults = [500]
    using(servers, ask, tmp_path)
    assert [len(server.bodies) for server in servers] == [1, 1]


def test_k86_sessions_spread_over_the_copies_behind_one_url(tmp_path: Path) -> None:
    server = Recording(dp_size=2)

    async def use(sampler: SGLangSampler) -> None:
        sessions = [sampler.open_session() for _ in range(4)]
        for _ in range(2):
            for session in sessions:
                await session.generate(PROMPT, SamplingParams(max_new_tokens=1))

    using([server], use, tmp_path)
    assert [body["routed_dp_rank"] for body in server.bodies] == [0, 1, 0, 1] * 2


def test_requests_at_fault_are_no_strikes_against_the_server(tmp_path: Path) -> None:
    server = FakeSGLang()
    server.faults = [400] * 5

    async def use(sampler: SGLangSampler) -> None:
        server.calls.clear()
        for _ in range(5):
            with pytest.raises(SamplerError, match="answered 400"):
                await ask(sampler)
        await ask(sampler)

    using([server], use, tmp_path)
    assert not server.calls  # it was never taken out


def test_k39_a_server_that_lost_its_weights_is_noticed_without_spans(tmp_path: Path) -> None:
    server = FakeSGLang(version="0.5.15", update_session=False, spans=False)

    async def use(sampler: SGLangSampler) -> Any:
        server.weight_version = "default"  # whoever runs it has started it anew
        return await ask(sampler)

    completion = using([server], use, tmp_path)
    assert list(completion.token_ids) == expected(PROMPT, 3)
    assert server.weight_version == "0"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"error": "unexpected keys"}', "unexpected keys"),
        ('{"error": {"message": "too long", "type": "BadRequestError"}}', "too long"),
        ('{"object": "error", "message": "no list", "code": 400}', "no list"),
        ("Internal Server Error\n", "Internal Server Error"),
    ],
)
def test_every_form_of_an_error_is_read(text: str, said: str) -> None:
    assert _message(text) == said


def test_servers_that_are_too_old_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SamplerError, match=r"is SGLang 0\.5\.14\.post1; 0\.5\.15 and newer are supported: upgrade"):
        using([FakeSGLang(version="0.5.14.post1")], ask, tmp_path)


def test_k35_servers_are_not_launched_to_give_log_probs_without_the_temperature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(sampler: SGLangSampler) -> None:
        with pytest.raises(ConfigError, match=r"SGLANG_RETURN_ORIGINAL_LOGPROB .* unset it"):
            launch(0, SGLangSamplerOptions(), sampler._context, devices=None)

    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    using([FakeSGLang()], use, tmp_path)


@pytest.mark.parametrize(("device", "saves"), [("cuda", True), ("cpu", False)])
def test_colocated_servers_are_launched_to_free_memory_where_there_is_some(
    device: str, saves: bool, tmp_path: Path
) -> None:
    environment = {"PYTHONPATH": str(Path(__file__).with_name("sglang_stand_in")), "STAND_IN": "die"}
    options = SGLangSamplerOptions(env=environment, server_args={"device": device}, colocate=True)

    async def use(sampler: SGLangSampler) -> str:
        with pytest.raises(SamplerError) as caught:
            await launch(0, options, sampler._context, devices=None).connect()
        return str(caught.value)

    said = using([FakeSGLang()], use, tmp_path)
    assert f"--device {device}" in said and ("--enable-memory-saver" in said) is saves


def test_k96_connections_notice_a_peer_that_vanished() -> None:
    with _socket_with_keepalive((socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 1))) as made:
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle, interval, count = (
            made.getsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_KEEP{name}")) for name in ("IDLE", "INTVL", "CNT")
        )
    assert idle + interval * count <= 60
    assert IDLE_SECONDS < 5  # after which uvicorn closes idle connections


def test_k42_experts_of_a_continued_completion_are_aligned_with_its_tokens(tmp_path: Path) -> None:
    server = FakeSGLang()

    async def use(sampler: SGLangSampler) -> Any:
        sampler._settings.num_experts_per_tok = 2  # its model has none, but its server says so
        sampler.options = sampler.options.model_copy(update={"routed_experts": True})
        server.hold = 2
        task = asyncio.ensure_future(ask(sampler, 4))
        await server.until(running=1, tokens=2)
        await sampler.update_weights(WEIGHTS, 1)
        await server.go()
        return await task

    completion = using([server], use, tmp_path)
    fed = [*PROMPT, *completion.token_ids][:-1]
    assert completion.versions == (0, 0, 1, 1)
    assert completion.routed_experts.tolist() == [[[id, id + 1]] for id in fed]
    assert completion.routed_experts.flags.writeable


# Servers that come and go -------------------------------------------------------------------------------------------


def test_a_server_that_cannot_join_disturbs_no_request(tmp_path: Path) -> None:
    async def use(sampler: SGLangSampler) -> Any:
        with pytest.raises(SamplerError, match=r"http://127\.0\.0\.1:9/server_info"):
            await sampler.add_engine("http://127.0.0.1:9")
        assert sampler.max_context == 1000
        return await ask(sampler)

    assert len(using([FakeSGLang()], use, tmp_path).token_ids) == 3


def test_k109_when_a_server_cannot_be_reached_no_other_is_waited_for(tmp_path: Path) -> None:
    class Hanging(FakeSGLang):
        async def _server_info(self, _: web.Request) -> web.Response:
            await asyncio.Event().wait()
            raise AssertionError

    async def use(sampler: SGLangSampler) -> list[str]:
        async with Hanging().serving() as hanging:
            urls = (hanging.url, "http://127.0.0.1:9")
            other = SGLangSampler(sampler._context, SGLangSamplerOptions(urls=urls))
            with pytest.raises(SamplerError, match=r"http://127\.0\.0\.1:9/server_info"):
                await other.start()
            left = [repr(task.get_coro()) for task in asyncio.all_tasks()]
            await other.aclose()
        return [coroutine for coroutine in left if "Engine.connect" in coroutine]

    assert using([FakeSGLang()], use, tmp_path) == []


def test_k110_a_removed_server_does_not_come_back(tmp_path: Path) -> None:
    servers = [Recording(), FakeSGLang()]

    async def use(sampler: SGLangSampler) -> State:
        member = sampler.fleet.members[0]
        servers[0].control_faults["update_weights_from_disk"] = [400]
        await sampler.update_weights(WEIGHTS, 1)
        assert member.state is State.JOINING
        await sampler.remove_engine(member)
        await sampler.fleet.settled()
        return member.state

    assert using(servers, use, tmp_path) is State.GONE


def test_k107_a_server_that_comes_back_misses_no_update(tmp_path: Path) -> None:
    """It serves from the moment it has the weights, not a moment later, when an update may have begun without it."""
    servers = [Recording(), FakeSGLang()]
    first = servers[0]
    assert isinstance(first, Recording)

    async def use(sampler: SGLangSampler) -> None:
        first.control_faults["update_weights_from_disk"] = [400]
        await sampler.update_weights(WEIGHTS, 1)
        first.held_back = "continue_generation"
        await first.reached.wait()
        update = asyncio.ensure_future(sampler.update_weights(WEIGHTS, 2))
        await asyncio.sleep(0)  # it waits for its turn
        async with sampler.fleet._changed:  # as a request may just then
            first.gate.set()
            for _ in range(200):
                await asyncio.sleep(0)
        await update
        await sampler.fleet.settled()
        assert [member.state for member in sampler.fleet.members] == [State.SERVING] * 2
        assert [server.weight_version for server in servers] == ["2", "2"]

    using(servers, use, tmp_path)


def test_a_server_that_came_back_has_a_clean_slate(tmp_path: Path) -> None:
    server = FakeSGLang()

    async def use(sampler: SGLangSampler) -> None:
        server.faults = [500] * 4
        await ask(sampler)

    using([server], use, tmp_path, retries=5)
    assert server.calls.count("update_weights_from_disk") == 2


def alone(revive: Callable[[Member], Awaitable[None]], close: Callable[[], Awaitable[None]]) -> Fleet:
    async def connect() -> None: ...

    fleet = Fleet(revive)
    fleet.members.append(Member(Engine("http://somewhere"), connect=connect, close=close))
    return fleet


def test_k109_whatever_a_revival_dies_of_ends_the_wait() -> None:
    async def revive(member: Member) -> None:
        raise RuntimeError("CUDA error: out of memory")

    async def close() -> None:
        raise OSError("it does not close")

    async def run() -> None:
        fleet = alone(revive, close)
        await fleet.serve(fleet.members[0])
        await fleet.quarantine(fleet.members[0], SamplerError("hung"))
        with pytest.raises(SamplerError, match=r"no SGLang server is left: http://somewhere: .*out of memory"):
            await fleet.available()

    asyncio.run(asyncio.wait_for(run(), 10))


def test_servers_know_the_gpus_of_their_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    context = make_context(tmp_path)
    two, second = SGLangSamplerOptions(server_args={"tp-size": 2}), SGLangSamplerOptions(server_args={"base_gpu_id": 1})
    assert launch(0, two, context, devices=None).engine.devices == ("0", "1")
    assert launch(0, two, context, devices="5, 3,4").engine.devices == ("5", "3")
    assert launch(0, second, context, devices=None).engine.devices == ("1",)
    told = SGLangSamplerOptions(env={"CUDA_VISIBLE_DEVICES": "3"})
    assert launch(0, told, context, devices="1").engine.devices == ("3",)
    colocated = SGLangSamplerOptions(colocate=True)
    assert launch(0, colocated, context, devices="1").engine.devices == ("1",)
    with pytest.raises(ConfigError, match=r"GPU 7, which the learner does not see \(it sees \['0', '1'\]\)"):
        launch(0, colocated, context, devices="7")


def test_a_server_that_joins_gets_devices_that_no_other_has(tmp_path: Path) -> None:
    sampler = SGLangSampler(make_context(tmp_path), SGLangSamplerOptions(engines=2, devices=("0,1", "2,3", "4,5")))
    for devices in ("0,1", "2,3", "4,5"):
        sampler.fleet.members.append(sampler._member(None))
        assert sampler.fleet.members[-1].devices == devices
    with pytest.raises(SamplerError, match=r"all of sampler.devices .* have a server; list those that may join"):
        sampler._member(None)
    sampler.fleet.members[1].state = State.GONE
    assert sampler._member(None).devices == "2,3"


class Bytes:
    """A tokenizer with one token for each byte."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return bytes(ids).decode(errors="replace")


def test_stop_strings_of_many_bytes_are_found_over_a_weight_update(tmp_path: Path) -> None:
    context = dataclasses.replace(make_context(tmp_path), tokenizer=Bytes())
    sampler = SGLangSampler(context, SGLangSamplerOptions())
    ids = [*"ab日本cd".encode()]
    assert sampler.stop_length(ids, 3, ("日本",)) == 8
