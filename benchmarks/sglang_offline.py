"""What `sglang_rollouts.py` compares with: SGLang's own offline engine, in a process that has nothing else.

It runs under the interpreter that has SGLang, so it imports nothing of ours.

    python benchmarks/sglang_offline.py WORK.json RESULT.json
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from pathlib import Path
from typing import Any


def random_ids(name: str, length: int, vocabulary: int) -> list[int]:
    """Token ids, the same for the same name."""
    return random.Random(name).choices(range(vocabulary), k=length)


def completion_length(name: str, turn: int, work: dict[str, Any]) -> int:
    """Tokens that an episode samples in a turn: `output`, and up to the share `spread` of it more or less."""
    share = work["spread"] * random.Random(f"{name}/{turn}/length").uniform(-1, 1)
    return max(1, round(work["output"] * (1 + share)))


class Episode:
    """One episode: what it asks next, and what it was told."""

    def __init__(self, name: str, work: dict[str, Any]) -> None:
        self.name, self.work, self.turn = name, work, 0
        self.prompt = random_ids(name, work["prompt"], work["vocabulary"])
        self.read = self.cached = 0

    @property
    def length(self) -> int:
        """Tokens that it samples now."""
        return completion_length(self.name, self.turn, self.work)

    def take(self, reply: dict[str, Any]) -> None:
        """The reply to its prompt."""
        meta = reply["meta_info"]
        got = [entry[1] for entry in meta["output_token_logprobs"]]
        if len(got) != self.length:
            raise SystemExit(f"a completion has {len(got)} tokens, not {self.length}: {meta['finish_reason']}")
        if self.turn:
            self.read, self.cached = self.read + len(self.prompt), self.cached + meta["cached_tokens"]
        more = random_ids(f"{self.name}/{self.turn}", self.work["observation"], self.work["vocabulary"])
        self.prompt = [*self.prompt, *got, *more]
        self.turn += 1


def asked(episodes: list[Episode]) -> dict[str, Any]:
    """Arguments of a call for some episodes."""
    common = {"temperature": 1.0, "skip_special_tokens": False}
    return {
        "input_ids": [episode.prompt for episode in episodes],
        "sampling_params": [{**common, "max_new_tokens": episode.length} for episode in episodes],
        "return_logprob": [True] * len(episodes),
        "logprob_start_len": [-1] * len(episodes),
    }


def by_turn(engine: Any, episodes: list[Episode]) -> None:
    """All episodes of a turn in one call, which ends with the longest."""
    for _ in range(episodes[0].work["turns"]):
        for episode, reply in zip(episodes, engine.generate(**asked(episodes)), strict=True):
            episode.take(reply)


def by_episode(engine: Any, episodes: list[Episode]) -> None:
    """Each episode goes on as soon as its own turn is done."""

    async def one(episode: Episode) -> None:
        for _ in range(episode.work["turns"]):
            (reply,) = await engine.async_generate(**asked([episode]))
            episode.take(reply)

    async def everyone() -> None:
        await asyncio.gather(*map(one, episodes))

    engine.loop.run_until_complete(everyone())


WAYS = {"by_turn": by_turn, "by_episode": by_episode}


def play(engine: Any, work: dict[str, Any], concurrency: int, name: str, way: str) -> tuple[float, int, int]:
    """All turns of all episodes: seconds, and tokens of prompts read and cached after the first turn."""
    start = time.perf_counter()
    episodes = [Episode(f"{name}/{number}", work) for number in range(concurrency)]
    WAYS[way](engine, episodes)
    seconds = time.perf_counter() - start
    return seconds, sum(episode.read for episode in episodes), sum(episode.cached for episode in episodes)


def main() -> None:
    """Play each concurrency in each way, the first time without counting it."""
    import sglang

    work = json.loads(Path(sys.argv[1]).read_text())
    engine = sglang.Engine(model_path=work["model"], **work["server_args"])
    result: dict[str, Any] = {way: {} for way in WAYS}
    for concurrency in work["concurrency"]:
        for way in WAYS:
            names = [f"{concurrency}-{way}-{n}" for n in range(work["repeats"] + 1)]
            runs = [play(engine, work, concurrency, name, way) for name in names][1:]
            read, cached = sum(run[1] for run in runs), sum(run[2] for run in runs)
            result[way][str(concurrency)] = {
                "seconds": [run[0] for run in runs],
                "cache_hit_rate": cached / read if read else None,
            }
    Path(sys.argv[2]).write_text(json.dumps(result))
    engine.shutdown()


if __name__ == "__main__":
    main()
