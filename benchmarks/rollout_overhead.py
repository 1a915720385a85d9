"""What one turn costs besides the model and the env: µs per turn and how late the event loop gets.

Episodes of a trivial env are played as training plays them (`Player`, one reward), all at once, with a sampler that
answers at once. So all episodes want the event loop at the same moment: the worst case.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from machine import describe

import relax_gym
from relax_gym import Env, StepResult, Task, user
from relax_gym.chat import ChatRenderer
from relax_gym.config import RolloutConfig
from relax_gym.play import Episode, Player, close_sessions
from relax_gym.sampler import SamplingParams
from relax_gym.scoring import WeightedReward, score
from relax_gym.testing import ScriptedSampler, tiny_tokenizer
from relax_gym.types import Trajectory
from relax_gym.workers import WorkerThreads
from relax_gym_rewards.env_return import EnvReturn

TURNS = 10
TICK = 0.005
REPEATS = 5
# One episode at a time needs many in a row to be measured.
CASES = {1: 50, 100: 200, 1000: 1000}
RESULTS = Path(__file__).parent / "results" / "rollout_overhead_cpu.json"


class Talk(Env):
    """Says one sentence a turn."""

    def __init__(self) -> None:
        self.turn = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin."""
        super().reset(seed=seed)
        return user("Guess the number between 1 and 100. Answer with a number."), {}

    def step(self, action: str) -> Any:
        """Go on until the last turn."""
        self.turn += 1
        done = self.turn == TURNS
        return StepResult(user("The number is higher than that."), float(done), done, False, {"turn": self.turn})


class TalkAsync(Talk):
    """The same with coroutines."""

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin."""
        return super().reset(seed=seed, options=options)

    async def step(self, action: str) -> Any:
        """Go on until the last turn."""
        return super().step(action)


ENVS: dict[str, type[Env]] = {"sync": Talk, "async": TalkAsync}
REWARDS = [WeightedReward(name="env_return", weight=1.0, reward=EnvReturn())]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table: medians over repeats; lag in milliseconds, `lag_max` over all repeats.

    `cpu_us_per_turn` is CPU time of all threads of this process; unlike wall time it does not grow much when other
    processes want the same cores.
    """

    env: str
    concurrent: int
    us_per_turn: float
    us_min: float
    us_max: float
    cpu_us_per_turn: float
    lag_p50: float
    lag_p99: float
    lag_max: float


def make_sampler(tokenizer: Any) -> ScriptedSampler:
    """Gives the same short answer in every turn, after one pass of the event loop."""
    answer = [*tokenizer.encode("I guess 42", add_special_tokens=False), tokenizer.eos_token_id]
    return ScriptedSampler([answer] * TURNS, tokenizer=tokenizer, delay=1, keep_requests=False)


def make_player(tokenizer: Any, sampler: ScriptedSampler) -> Player:
    """A player as training has it."""
    return Player(
        sampler=sampler,
        renderer=ChatRenderer(tokenizer),
        rewards=REWARDS,
        config=RolloutConfig(max_turns=TURNS, max_new_tokens=32),
    )


async def play(player: Player, env_id: str, count: int) -> list[Trajectory]:
    """Play `count` episodes side by side."""
    episodes = [Episode(id=str(index), task=Task(env_id=env_id, seed=index), seed=index) for index in range(count)]
    sessions = player.open_sessions(count)
    try:
        return await player.play(episodes, sessions)
    finally:
        close_sessions(sessions)


async def watch(lags: list[float]) -> None:
    """Sleep TICK again and again; note by how much each sleep is too long, in milliseconds."""
    while True:
        start = time.perf_counter()
        await asyncio.sleep(TICK)
        lags.append(1e3 * (time.perf_counter() - start - TICK))


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Wall and CPU seconds of some work, and the loop's lags meanwhile in milliseconds."""

    wall: float
    cpu: float
    lags: list[float]


async def timed(work: Callable[[], Awaitable[Any]]) -> Timing:
    """Do the work and watch the loop meanwhile."""
    lags: list[float] = []
    watcher = asyncio.create_task(watch(lags))
    await asyncio.sleep(2 * TICK)
    start, cpu = time.perf_counter(), time.process_time()
    await work()
    timing = Timing(wall=time.perf_counter() - start, cpu=time.process_time() - cpu, lags=lags)
    await asyncio.sleep(2 * TICK)
    watcher.cancel()
    return timing


async def measure_machine() -> dict[str, float]:
    """Lags of a loop that is busy 2 ms at a time and has nothing else to do: what the machine itself adds."""

    async def work() -> None:
        for _ in range(1000):
            end = time.thread_time() + 0.002
            while time.thread_time() < end:
                pass
            await asyncio.sleep(0)

    lags = (await timed(work)).lags
    return {"lag_p50": percentile(lags, 0.5), "lag_p99": percentile(lags, 0.99), "lag_max": max(lags)}


async def measure(player: Player, env: str, concurrent: int) -> Row:
    """Play warm-up episodes, then REPEATS times as many as the case says."""
    rounds = CASES[concurrent] // concurrent

    async def work() -> None:
        for _ in range(rounds):
            trajectories = await play(player, f"bench/{env}-v0", concurrent)
            assert all(len(t.turns) == TURNS and t.reward == 1.0 for t in trajectories)

    await work()
    runs = [await timed(work) for _ in range(REPEATS)]
    per_turn = 1e6 / (rounds * concurrent * TURNS)
    times = [per_turn * run.wall for run in runs]
    return Row(
        env=env,
        concurrent=concurrent,
        us_per_turn=statistics.median(times),
        us_min=min(times),
        us_max=max(times),
        cpu_us_per_turn=statistics.median(per_turn * run.cpu for run in runs),
        lag_p50=statistics.median(percentile(run.lags, 0.5) for run in runs),
        lag_p99=statistics.median(percentile(run.lags, 0.99) for run in runs),
        lag_max=max(max(run.lags) for run in runs),
    )


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def measure_parts(tokenizer: Any) -> dict[str, float]:
    """µs per turn of the parts, each alone, one episode at a time. The last is not ours, but in every number above."""
    player = make_player(tokenizer, make_sampler(tokenizer))
    (episode,) = await play(player, "bench/sync-v0", 1)
    threads = WorkerThreads("bench")
    prompts = list(itertools.accumulate(turn.context_ids + turn.completion.token_ids for turn in episode.turns))
    params = SamplingParams(max_new_tokens=32)

    async def chat() -> None:
        conversation = player.renderer.conversation()
        for turn in episode.turns:
            conversation.observe(turn.observation)
            text = player.renderer.decode(turn.completion.token_ids)
            conversation.complete(turn.completion.token_ids, text)
            player.renderer.action(text, opened=conversation.opened_thinking)

    async def hop() -> None:
        for _ in episode.turns:
            await threads.call(int, timeout=60.0)

    async def scoring() -> None:
        await score(episode, REWARDS, timeout=60.0, threads=threads)

    async def sample() -> None:
        (session,) = player.open_sessions(1)
        for prompt in prompts:
            await session.generate(prompt, params)

    parts = {"chat": chat, "thread hop": hop, "scoring": scoring, "scripted sampler": sample}
    out = {name: await median_time(part) / TURNS for name, part in parts.items()}
    threads.close()
    await player.aclose()
    return out


async def median_time(part: Callable[[], Awaitable[None]]) -> float:
    """µs of one call, the median of many."""
    times = []
    for _ in range(101):
        start = time.perf_counter()
        await part()
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times)


async def measure_all() -> dict[str, Any]:
    """Everything that is printed and written."""
    tokenizer = tiny_tokenizer()
    player = make_player(tokenizer, make_sampler(tokenizer))
    rows = [await measure(player, env, concurrent) for env in ENVS for concurrent in CASES]
    await player.aclose()
    return {
        "rows": [asdict(row) for row in rows],
        "machine": await measure_machine(),
        "parts_us_per_turn": await measure_parts(tokenizer),
    }


def show(results: dict[str, Any]) -> None:
    """Print the tables."""
    print("| env | episodes at once | µs per turn (min to max) | of CPU time | loop lag p50, p99, max in ms |")
    print("|---|---:|---:|---:|---:|")
    for r in results["rows"]:
        spread = f"{r['us_per_turn']:.0f} ({r['us_min']:.0f} to {r['us_max']:.0f})"
        lag = f"{r['lag_p50']:.1f}, {r['lag_p99']:.1f}, {r['lag_max']:.1f}"
        print(f"| {r['env']} | {r['concurrent']:,} | {spread} | {r['cpu_us_per_turn']:.0f} | {lag} |")
    m = results["machine"]
    print(f"| a loop busy 2 ms at a time | | | | {m['lag_p50']:.1f}, {m['lag_p99']:.1f}, {m['lag_max']:.1f} |")
    print("\n| part, one episode at a time | µs per turn |\n|---|---:|")
    for name, value in results["parts_us_per_turn"].items():
        print(f"| {name} | {value:.0f} |")


def main() -> None:
    """Measure, print and, when asked, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.parent.name}/{RESULTS.name}")
    arguments = parser.parse_args()
    for env, factory in ENVS.items():
        relax_gym.register(f"bench/{env}-v0", factory)
    results = asyncio.run(measure_all())
    show(results)
    if arguments.write:
        RESULTS.write_text(
            json.dumps({**describe(), **results}, indent=2) + "\n",
            encoding="utf-8",
        )


if __name__ == "__main__":
    main()
