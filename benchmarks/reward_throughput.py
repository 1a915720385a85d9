"""How many episodes each reward scores in a second, what the pool of processes costs, and what the event loop notices.

Rewards are asked as a run asks them, all episodes at once. The lag of the loop is by how much a sleep of 5 ms is too
long while math answers are scored of which one in a hundred never ends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from machine import describe

from relax_gym.isolation import isolated
from relax_gym.plugins import plugins
from relax_gym.rescoring import text_case
from relax_gym.scoring import WeightedReward, close_rewards, make_reward, score
from relax_gym.types import Trajectory
from relax_gym.workers import WorkerThreads

RESULTS = Path(__file__).parent / "results" / "reward_throughput_cpu.json"
TICK, HOUR = 0.005, 3600.0
PROSE = "The capital of France is Paris, and the Seine runs through it on its way to the sea. "
ENDLESS = "$9^{9^{9^9}}$"
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "exact_match": ("Paris", {"answer": "Paris"}, {}),
    "numeric": ("So it is 1,234.5 in all.", {"answer": 1234.5}, {}),
    "f1": (PROSE, {"answer": "Paris"}, {}),
    "multiple_choice": ("The answer is B.", {"answer": "B"}, {}),
    "gsm8k": ("5 + 6 = 11\n#### 11", {"answer": "#### 11"}, {}),
    "regex": (PROSE, {}, {"pattern": "[A-Z][a-z]+"}),
    "json_schema": ('{"city": "Paris"}', {}, {"schema": {"type": "object", "required": ["city"]}}),
    "ifbench": (PROSE, {"instructions": [{"kind": "words", "relation": "at most", "count": 50}]}, {}),
    "iou": ("[10, 10, 20, 20]", {"bbox": [12, 12, 22, 22]}, {}),
    "format": (f"<think>{PROSE}</think><answer>4</answer>", {}, {}),
    "repetition": (PROSE * 20, {}, {}),
    "wer": (PROSE, {"answer": PROSE}, {}),
    "bleu": (PROSE, {"answer": PROSE}, {}),
    "dapo_math": ("Answer: 34", {"answer": "34"}, {}),
    "math": (r"so \boxed{\frac{1}{2}}", {"answer": "0.5"}, {}),
}


class Trivial:
    """Costs nothing."""

    def __call__(self, trajectory: Trajectory) -> float:
        return 1.0


class TrivialIsolated(Trivial):
    """The same in the pool."""

    isolated = True


def episode(action: str, info: dict[str, Any]) -> Trajectory:
    """One answer, with its context and ids as in a run."""
    return text_case(action, info=info).trajectory


def term(reward: Any) -> WeightedReward:
    """With weight 1."""
    return WeightedReward(name="r", weight=1.0, key=getattr(reward, "key", None), reward=reward)


async def score_all(reward: Any, episodes: Sequence[Trajectory]) -> tuple[float, list[Trajectory]]:
    """Seconds for all at once, after one that starts what has to be started, and the scored."""
    asked, threads = term(reward), WorkerThreads("reward", limit=16)
    await score(episodes[0], [asked], timeout=HOUR, threads=threads)
    start = time.perf_counter()
    found = await asyncio.gather(*(score(one, [asked], timeout=HOUR, threads=threads) for one in episodes))
    seconds = time.perf_counter() - start
    await close_rewards([asked], timeout=HOUR, threads=threads)
    threads.close()
    return seconds, found


async def with_lag(work: Awaitable[Any]) -> tuple[Any, list[float]]:
    """What the work returns, and by how many ms each sleep beside it was too long."""
    task, late = asyncio.ensure_future(work), []
    while not task.done():
        start = time.perf_counter()
        await asyncio.sleep(TICK)
        late.append((time.perf_counter() - start - TICK) * 1e3)
    return task.result(), late


async def by_reward(count: int) -> list[dict[str, Any]]:
    """Scores per second of each reward."""
    rows = []
    for name, (action, info, options) in CASES.items():
        reward = make_reward(plugins().get("reward", name), options)
        seconds, found = await score_all(reward, [episode(action, info)] * count)
        assert not found[0].reward_failures, found[0].reward_failures
        rows.append({"reward": name, "scores": count, "scores_per_second": count / seconds})
    return rows


async def overhead(count: int) -> dict[str, float]:
    """µs that a score takes in a thread and in the pool, all at once."""
    episodes = [episode("x", {})] * count
    return {
        name: (await score_all(isolated(reward), episodes))[0] / count * 1e6
        for name, reward in (("thread", Trivial()), ("pool", TrivialIsolated()))
    }


async def mathematics(count: int, timeout: float) -> dict[str, Any]:
    """Loop lag while so many answers are checked, one in a hundred endless."""
    reward = make_reward(plugins().get("reward", "math"), {"timeout": timeout})
    right = [episode(rf"so \boxed{{{number}}}", {"answer": f"{number}.0"}) for number in range(count)]
    mixed = [episode(ENDLESS, {"answer": "$x+1$"}) if at % 100 == 50 else one for at, one in enumerate(right)]
    (seconds, found), late = await with_lag(score_all(reward, mixed))
    p50, p99 = np.percentile(late, [50, 99])
    return {
        "answers": count,
        "endless": sum(at % 100 == 50 for at in range(count)),
        "timeout": timeout,
        "seconds": seconds,
        "right": sum(one.reward == 1.0 for one in found),
        "unscored": sum(one.reward is None for one in found),
        "lag_ms": {"p50": float(p50), "p99": float(p99), "max": max(late)},
    }


def main() -> None:
    """Measure, print and, when asked, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scores", type=int, default=2000, help="of each reward")
    parser.add_argument("--answers", type=int, default=10_000, help="of mathematics, one in a hundred endless")
    parser.add_argument("--timeout", type=float, default=1.0, help="seconds of a check")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.parent.name}/{RESULTS.name}")
    arguments = parser.parse_args()
    rows = asyncio.run(by_reward(arguments.scores))
    print("| reward | scores/s |\n|---|---:|")
    for row in rows:
        print(f"| {row['reward']} | {row['scores_per_second']:,.0f} |")
    cost = asyncio.run(overhead(arguments.scores))
    print(f"\nA score that costs nothing: {cost['thread']:.0f} µs in a thread, {cost['pool']:.0f} µs in the pool")
    math = asyncio.run(mathematics(arguments.answers, arguments.timeout))
    print(f"\n{math}")
    if arguments.write:
        out = {"load_average": os.getloadavg()[0], "rewards": rows, "microseconds": cost, "mathematics": math}
        RESULTS.write_text(json.dumps({**describe(), **out}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
