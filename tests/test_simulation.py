"""Simulated time, engine and learner, and what the real loop makes of them. Nothing is waited for."""

from __future__ import annotations

import asyncio
import itertools
import time
from pathlib import Path
from typing import Any

import pytest
from train_cases import half_a, trainer

from relax_gym.lines import read_lines
from relax_gym.sampler import SamplingParams
from relax_gym.testing import SimulatedEngine, SimulatedLearner, SimulatedLoop, heavy_tailed
from relax_gym.types import Completion
from relax_gym.workers import Worker

EXACT = 1e-4
"""Seconds; simultaneous requests wait a microsecond for each other."""


def engine(lengths: Any, **options: Any) -> SimulatedEngine:
    return SimulatedEngine(lengths, **{"concurrency": 100, "tokens_per_second": 10.0, **options})


async def ask(sampler: SimulatedEngine, seed: int = 0, most: int = 1000) -> tuple[Completion, float]:
    session = sampler.open_session()
    completion = await session.generate([1], SamplingParams(max_new_tokens=most, seed=seed))
    session.close()
    return completion, asyncio.get_running_loop().time()


def test_time_jumps_to_the_next_timer() -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        seen = [loop.time()]
        await asyncio.gather(asyncio.sleep(3600), asyncio.sleep(7200))
        seen.append(loop.time())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.5):
                await asyncio.Event().wait()
        return [*seen, loop.time()]

    assert SimulatedLoop().run(main()) == [0.0, 7200.0, 7201.5]


def test_time_waits_for_threads_but_for_those_that_sleep() -> None:
    loop = SimulatedLoop()

    async def main() -> tuple[float, float, float]:
        worker, other = Worker("one"), Worker("other")
        asyncio.get_running_loop().call_later(5, lambda: None)
        await worker.call(lambda: time.sleep(0.05))
        worked = loop.time()
        await asyncio.to_thread(lambda: time.sleep(0.05))
        handed = loop.time()
        await asyncio.gather(worker.call(loop.sleep, 2.0), other.call(loop.sleep, 3.0), asyncio.sleep(1.0))
        worker.stop(), other.stop()
        return worked, handed, loop.time()

    assert loop.run(main()) == (0.0, 0.0, 3.0)


def test_lengths_have_a_long_tail_and_depend_on_the_seed_alone() -> None:
    length = heavy_tailed(20.0, 1.0, 400)
    drawn = [length(seed) for seed in range(2000)]
    assert drawn == [length(seed) for seed in range(2000)]
    assert sorted(drawn)[1000] == pytest.approx(20, abs=2)
    assert max(drawn) > 8 * sum(drawn) / len(drawn)
    assert {min(drawn) >= 1, max(drawn) <= 400} == {True}


def test_an_engine_decodes_as_many_as_it_has_places_for_in_the_order_they_came() -> None:
    async def main() -> list[float]:
        sampler = engine(lambda seed: 10, concurrency=2)
        return [at for _, at in await asyncio.gather(*(ask(sampler) for _ in range(5)))]

    assert SimulatedLoop().run(main()) == pytest.approx([1, 1, 2, 2, 3], abs=EXACT)


def test_weights_change_in_flight_and_tokens_know_their_version() -> None:
    async def main() -> tuple[Completion, float, float]:
        sampler = engine(lambda seed: 10, tokens_per_second=1.0, publish_seconds=2.0)
        await sampler.update_weights((), 0)
        asked = asyncio.ensure_future(ask(sampler))
        await asyncio.sleep(4.5)
        await sampler.update_weights((), 1)
        return *await asked, sampler.metrics()["busy_seconds"]

    completion, at, busy = SimulatedLoop().run(main())
    assert completion.versions == (0,) * 4 + (1,) * 6
    assert at == pytest.approx(2 + 10 + 2, abs=EXACT)
    assert busy == pytest.approx(10, abs=EXACT)


def test_an_engine_may_be_slower_the_more_it_has_to_decode() -> None:
    async def main() -> list[float]:
        sampler = engine(lambda seed: seed, tokens_per_second=lambda running: 10.0 / running)
        alone = asyncio.ensure_future(ask(sampler, 30))
        await asyncio.sleep(1)
        beside = asyncio.ensure_future(ask(sampler, 10))  # 20 are left: ten at half the speed, then ten alone
        return [(await alone)[1], (await beside)[1]]

    assert SimulatedLoop().run(main()) == pytest.approx([4, 3], abs=EXACT)


def test_a_cancelled_request_leaves_its_place_and_a_long_one_is_cut() -> None:
    async def main() -> tuple[Completion, float]:
        sampler = engine(lambda seed: seed, concurrency=1)
        first, second = (asyncio.ensure_future(ask(sampler, 100)) for _ in range(2))
        await asyncio.sleep(1)
        first.cancel(), second.cancel()
        return await ask(sampler, 100, most=20)

    completion, at = SimulatedLoop().run(main())
    assert (len(completion.token_ids), completion.finish_reason.value) == (20, "length")
    assert at == pytest.approx(3, abs=EXACT)


def simulated(
    folder: Path, lengths: Any, *, seconds: float, publish: float = 0.5, group_seconds: float = 0.0, **train: Any
) -> list[dict[str, Any]]:
    """The metrics of a run."""
    loop = SimulatedLoop()
    learner = SimulatedLearner(loop, lambda batch: seconds, group_seconds=group_seconds)
    sampler = engine(lengths, publish_seconds=publish)
    loop.run(trainer(folder, half_a, learner, sampler=sampler, rollout={"max_new_tokens": 1000}, train=train).run())
    return read_lines(folder / "run" / "metrics.jsonl")


def test_in_lockstep_both_sides_wait_for_each_other(tmp_path: Path) -> None:
    for line in simulated(tmp_path, lambda seed: 10, seconds=2.0):
        assert line["time/rollout_wait"] == line["time/learner_bubble"] == pytest.approx(1, abs=EXACT)
        assert line["time/train"] == pytest.approx(2, abs=EXACT)
        assert line["time/publish"] == pytest.approx(0.5, abs=EXACT)
        assert line["time/step"] == pytest.approx(3.5, abs=EXACT)
        assert line["time/sampler_bubble"] == pytest.approx(2.5, abs=EXACT)
        assert line["time/episode_p50"] == line["time/episode_max"] == pytest.approx(1, abs=EXACT)
        assert line["perf/sampled_tokens_per_second"] == pytest.approx(80 / 3.5, rel=EXACT)
        assert line["perf/tokens_per_second"] == pytest.approx(80 / 3.5, rel=EXACT)


def test_groups_that_are_streamed_take_no_time_of_the_step_but_the_last(tmp_path: Path) -> None:
    options = {"seconds": 0.0, "group_seconds": 1.0, "groups_per_step": 3, "group_size": 2, "steps": 3}
    ends = itertools.cycle([10, 30, 50, 70, 90, 110])  # tokens, of which there are ten in a second
    for line in simulated(tmp_path, lambda seed: next(ends), **options):
        assert line["time/prepare"] == pytest.approx(2, abs=EXACT)
        assert line["time/train"] == pytest.approx(1, abs=EXACT)
        assert line["time/learner_bubble"] == pytest.approx(11 - 2, abs=EXACT)
        assert line["time/step"] == pytest.approx(11 + 1 + 0.5, abs=EXACT)


def test_ahead_by_one_version_the_learner_never_waits(tmp_path: Path) -> None:
    first, *others = simulated(tmp_path, lambda seed: 10, seconds=2.0, max_staleness=1, steps=5)
    assert first["time/learner_bubble"] == pytest.approx(1, abs=EXACT)
    for line in others[:-1]:
        assert line["time/learner_bubble"] == pytest.approx(0, abs=EXACT)
        assert line["time/step"] == pytest.approx(2.5, abs=EXACT)
        assert line["time/sampler_bubble"] == pytest.approx(1.5, abs=EXACT)
        assert line["staleness/mean"] == 1.0


def test_a_simulated_run_is_the_same_each_time(tmp_path: Path) -> None:
    options = {"max_staleness": 1, "order": "ready", "oversample": 1, "steps": 4}
    one, other = (simulated(tmp_path / n, heavy_tailed(20, 1, 400), seconds=3.0, **options) for n in "ab")
    for line in (*one, *other):
        line.pop("perf/loop_lag_max")  # of the machine
    assert one == other


@pytest.mark.slow
def test_ahead_of_a_heavy_tail_steps_take_what_the_learner_takes(tmp_path: Path) -> None:
    lengths, options = heavy_tailed(20, 1, 240), {"steps": 16, "groups_per_step": 8}
    sync, ahead = (
        simulated(tmp_path / str(s), lengths, seconds=12.0, publish=0.1, max_staleness=s, **options)[4:] for s in (0, 2)
    )
    seconds = [sum(line["time/step"] for line in lines) for lines in (sync, ahead)]
    waited = sum(line["time/learner_bubble"] for line in ahead)
    assert seconds[0] / seconds[1] >= 1.76
    assert waited <= 0.02 * seconds[1]
    assert seconds[1] <= 1.1 * len(ahead) * 12.1  # what the learner alone takes
