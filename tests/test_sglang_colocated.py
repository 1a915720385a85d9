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
