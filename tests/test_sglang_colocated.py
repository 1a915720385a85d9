"""Servers that share a GPU with the learner: which memory they hold when. They are scripted, and no test reads the
clock."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from recording_sglang import Recording, ask
from test_sglang_sampler import WEIGHTS, using

from relax_gym.errors import SamplerError
from relax_gym_plugins.samplers.sglang.engine import MEMORY
from relax_gym_plugins.samplers.sglang.fleet import Member
from relax_gym_plugins.samplers.sglang.sampler import SGLangSampler


class WithMemory(Recording):
    """Knows what memory it has released, and dies, as SGLang does, of having to resume any other."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.released: set[str] = set()
        self.deaths = 0

    def start_anew(self, *, seed: int | None = None) -> None:
        """As whoever runs it does; without a seed it was given one to start with."""
        self.released, self.weight_version, self.paused = set(), "default", False
        self.seed = self.seed if seed is None else seed

    async def _control(self, http: web.Request) -> web.Response:
        name = http.match_info["control"]
        tags = set((await http.json())["tags"]) if name.endswith("_memory_occupation") else set()
        if name == "resume_memory_occupation" and not tags <= self.released:
            self.deaths += 1
            self.start_anew()
            return web.json_response({}, status=500)
        answer = await super()._control(http)
        if answer.status == 200:
            self.released = self.released | tags if name.startswith("release") else self.released - tags
        return answer


# Servers that somebody else starts anew -----------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "seed"), [(0, None), (0, 2), (None, 2)])
def test_a_server_that_was_started_anew_is_not_asked_for_memory_that_it_has(
    version: int | None, seed: int | None, tmp_path: Path
) -> None:
    server = WithMemory()

    async def use(sampler: SGLangSampler) -> Any:
        await sampler.rest()
        server.start_anew(seed=seed)
        await sampler.update_weights(WEIGHTS, 1)
        return await ask(sampler)

    assert using([server], use, tmp_path, colocate=True, version=version).versions == (1, 1, 1)
    assert (server.deaths, server.released) == (0, set())


@pytest.mark.parametrize("dies_with", ["update_weights_from_disk", "resume_memory_occupation"])
def test_a_server_that_dies_in_an_update_comes_back_with_its_memory(dies_with: str, tmp_path: Path) -> None:
    """It may be before it has the weights that were sent, or after."""

    class Dying(WithMemory):
        async def _control(self, http: web.Request) -> web.Response:
            if http.match_info["control"] == dies_with and "weights" not in self.released and not died:
                died.append(dies_with)
                self.start_anew()
                return web.json_response({}, status=500)
            return await super()._control(http)

    server, died = Dying(), ["not yet"]

    async def use(sampler: SGLangSampler) -> Any:
        await sampler.rest()
        died.clear()
        await sampler.update_weights(WEIGHTS, 1)
        return await ask(sampler)

    assert using([server], use, tmp_path, colocate=True).versions == (1, 1, 1)
    assert (died, server.deaths, server.released) == ([dies_with], 0, set())


def test_a_server_that_failed_after_it_took_the_weights_has_all_its_memory_again(tmp_path: Path) -> None:
    """It says another version than when it released memory, and is the same process all the same."""
    server = WithMemory()

    async def use(sampler: SGLangSampler) -> Any:
        await sampler.rest()
        server.held_back = "update_weights_from_disk"
        update = asyncio.ensure_future(sampler.update_weights(WEIGHTS, 1))
        await server.reached.wait()
        server.control_faults["resume_memory_occupation"] = [500]
        server.gate.set()
        await update
        return await ask(sampler)

    assert using([server], use, tmp_path, colocate=True).versions == (1, 1, 1)
    assert (server.deaths, server.released) == (0, set())


# Servers that come while the learner trains -------------------------------------------------------------------------


async def for_a_while() -> None:
    for _ in range(200):
        await asyncio.sleep(0)


def test_a_server_that_comes_back_while_the_learner_trains_frees_its_memory(tmp_path: Path) -> None:
    servers = [WithMemory(), WithMemory()]

    async def use(sampler: SGLangSampler) -> Any:
        await sampler.fleet.quarantine(sampler.fleet.members[1], SamplerError("it died while it sampled"))
        await sampler.rest()
        await sampler.fleet.settled()
        assert [server.released for server in servers] == [{*MEMORY}] * 2
        await sampler.update_weights(WEIGHTS, 1)
        return await asyncio.gather(ask(sampler), ask(sampler))

    assert [completion.versions for completion in using(servers, use, tmp_path, colocate=True)] == [(1, 1, 1)] * 2
    assert [(len(server.bodies), server.deaths, server.released) for server in servers] == [(1, 0, set())] * 2


def test_a_server_that_joins_while_the_learner_trains_frees_its_memory(tmp_path: Path) -> None:
    first, second = WithMemory(), WithMemory()

    async def use(sampler: SGLangSampler) -> None:
        async with second.serving():
            await sampler.rest()
            await sampler.add_engine(second.url)
            assert second.released == {*MEMORY}
            await sampler.update_weights(WEIGHTS, 1)
            assert (second.released, second.weight_version, second.paused) == (set(), "1", False)
            await sampler.aclose()

    using([first], use, tmp_path, colocate=True)


def test_a_server_that_kept_some_memory_frees_it_when_it_comes_back_while_the_learner_trains(tmp_path: Path) -> None:
    """It failed in an update between its weights and its keys and values."""
    servers = [WithMemory(), WithMemory()]

    async def use(sampler: SGLangSampler) -> None:
        await sampler.rest()
        servers[1].control_faults |= {"pause_generation": [500], "update_weights_from_disk": [500]}
        await sampler.update_weights(WEIGHTS, 1)  # the server is sent the weights once more before it rests
        await sampler.rest()
        await sampler.fleet.settled()
        assert [server.released for server in servers] == [{*MEMORY}] * 2

    using(servers, use, tmp_path, colocate=True)


def launched(member: Member) -> list[str]:
    """Have an attached server pass for a launched one: what becomes of it."""
    connect, close, done = member.connect, member.close, list[str]()

    async def launch() -> None:
        done.append("launched")
        await connect()

    async def end() -> None:
        done.append("ended")
        await close()

    member.launched, member.connect, member.close = True, launch, end
    return done


@pytest.mark.parametrize("others", [0, 1])
def test_no_server_is_launched_while_the_learner_trains_and_no_update_waits_for_one(
    others: int, tmp_path: Path
) -> None:
    async def use(sampler: SGLangSampler) -> list[str]:
        member = sampler.fleet.members[0]
        done = launched(member)
        await sampler.rest()
        await sampler.fleet.quarantine(member, SamplerError("it died while it rested"))
        await for_a_while()
        done.append("updated")
        await sampler.update_weights(WEIGHTS, 1)
        await sampler.fleet.settled()
        assert (await ask(sampler)).versions == (1, 1, 1)
        assert len(sampler.fleet.serving) == 1 + others
        return done[:]

    servers = [Recording() for _ in range(1 + others)]
    assert using(servers, use, tmp_path, colocate=True) == ["updated", "launched"]


def test_the_learner_waits_for_a_launch_that_has_begun(tmp_path: Path) -> None:
    servers = [WithMemory(), WithMemory()]
    begun, gate = asyncio.Event(), asyncio.Event()

    async def use(sampler: SGLangSampler) -> None:
        member = sampler.fleet.members[0]
        connect = member.connect

        async def launch() -> None:
            begun.set()
            await gate.wait()
            await connect()

        member.launched, member.connect = True, launch
        await sampler.fleet.quarantine(member, SamplerError("it died while it sampled"))
        await begun.wait()
        rest = asyncio.ensure_future(sampler.rest())
        await for_a_while()
        assert not rest.done()
        gate.set()
        await rest
        assert [server.released for server in servers] == [{*MEMORY}] * 2

    using(servers, use, tmp_path, colocate=True)


def test_a_launched_server_that_frees_no_memory_ends_before_the_learner_trains(tmp_path: Path) -> None:
    servers = [Recording(), Recording()]

    async def use(sampler: SGLangSampler) -> list[str]:
        done = launched(sampler.fleet.members[0])
        servers[0].control_faults["release_memory_occupation"] = [500]
        await sampler.rest()
        done.append("rests")
        await sampler.update_weights(WEIGHTS, 1)
        await sampler.fleet.settled()
        assert len(sampler.fleet.serving) == 2
        return done[:]

    assert using(servers, use, tmp_path, colocate=True) == ["ended", "rests", "launched"]
