"""Whether memory stays flat: resident size after 100, 1,000 and 2,000 episodes whose trajectories are dropped.

Groups of episodes are played as training plays them and go through a `RolloutQueue` to a consumer that turns them into
training samples and lets go of them.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
from pathlib import Path
from typing import Any

from machine import describe
from rollout_overhead import ENVS, make_player, make_sampler

import relax_gym
from relax_gym.play import Episode, Player, close_sessions
from relax_gym.rollout_queue import RolloutQueue
from relax_gym.sampler import Session
from relax_gym.testing import tiny_tokenizer
from relax_gym.trajectory import to_samples
from relax_gym.types import Group, Task

GROUP_SIZE = 10
GROUPS_PER_STEP = 5
CHECKPOINTS = (100, 1000, 2000)
ALLOWED_MB, ALLOWED_SHARE = 5.0, 0.02
RESULTS = Path(__file__).parent / "results" / "memory_flat_cpu.json"


def resident_mb() -> float:
    """Resident memory of this process in MB (Linux)."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


async def fill(player: Player, queue: RolloutQueue, env_id: str, slot: int, sessions: list[Session]) -> None:
    """Play one group and hand it in."""
    task = Task(env_id=env_id, seed=slot)
    episodes = [Episode(id=f"{slot}-{index}", task=task, seed=index) for index in range(GROUP_SIZE)]
    try:
        trajectories = await player.play(episodes, sessions)
    finally:
        close_sessions(sessions)
    await queue.put(slot, Group(group_id=str(slot), slot=slot, trajectories=tuple(trajectories)))


async def produce(player: Player, queue: RolloutQueue, env_id: str) -> None:
    """Start a group for every slot."""
    async with asyncio.TaskGroup() as groups:
        while (slot := await queue.admit()) is not None:
            groups.create_task(fill(player, queue, env_id, slot, player.open_sessions(GROUP_SIZE)))


async def measure(env_id: str) -> dict[int, float]:
    """Resident MB by number of episodes that are over."""
    tokenizer = tiny_tokenizer()
    sampler = make_sampler(tokenizer)
    player = make_player(tokenizer, sampler)
    steps = CHECKPOINTS[-1] // (GROUP_SIZE * GROUPS_PER_STEP)
    queue = RolloutQueue(groups_per_step=GROUPS_PER_STEP, max_staleness=1, first_step=0, last_step=steps)
    sizes: dict[int, float] = {}
    await sampler.update_weights((), 0)
    producing = asyncio.create_task(produce(player, queue, env_id))
    for step in range(steps):
        groups = await queue.get(step)
        samples = [sample for group in groups for t in group.trajectories for sample in to_samples(t, group.group_id)]
        assert len(samples) == GROUP_SIZE * GROUPS_PER_STEP
        del groups, samples
        await sampler.update_weights((), step + 1)
        await queue.advance(step + 1)
        episodes = (step + 1) * GROUP_SIZE * GROUPS_PER_STEP
        if episodes in CHECKPOINTS:
            sizes[episodes] = resident_mb()
    await producing
    await player.aclose()
    return sizes


def report(env: str, sizes: dict[int, float]) -> dict[str, Any]:
    """Growth since the first checkpoint and whether it is allowed."""
    first, last = sizes[CHECKPOINTS[0]], sizes[CHECKPOINTS[-1]]
    growth = last - first
    return {
        "env": env,
        "resident_mb": sizes,
        "growth_mb": growth,
        "growth_share": growth / first,
        "flat": growth < ALLOWED_MB or growth / first < ALLOWED_SHARE,
    }


def main() -> None:
    """Measure, print and, when asked, write. The exit code is 1 when memory grows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.parent.name}/{RESULTS.name}")
    arguments = parser.parse_args()
    for env, factory in ENVS.items():
        relax_gym.register(f"bench/{env}-v0", factory)
    rows = [report(env, asyncio.run(measure(f"bench/{env}-v0"))) for env in ENVS]
    print("| env | " + " | ".join(f"{n:,} episodes, MB" for n in CHECKPOINTS) + " | growth |")
    print("|---|" + "---:|" * (len(CHECKPOINTS) + 1))
    for row in rows:
        sizes = " | ".join(f"{row['resident_mb'][n]:.1f}" for n in CHECKPOINTS)
        print(f"| {row['env']} | {sizes} | {row['growth_mb']:.1f} MB ({row['growth_share']:.1%}) |")
    if arguments.write:
        RESULTS.write_text(
            json.dumps({**describe(), "rows": rows}, indent=2) + "\n",
            encoding="utf-8",
        )
    if not all(row["flat"] for row in rows):
        raise SystemExit(f"memory grew by more than {ALLOWED_MB:g} MB and {ALLOWED_SHARE:.0%}")


if __name__ == "__main__":
    main()
