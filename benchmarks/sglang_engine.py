"""The offline half of sglang_throughput.py: needs SGLang and numpy, and not relax-gym."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY_USED = 1000


def first_prompt(episode: int, repeat: int, length: int) -> list[int]:
    """Ids of an episode's first prompt; no two have a common beginning."""
    ids: list[int] = np.random.default_rng([repeat, episode]).integers(1, VOCABULARY_USED, length).tolist()
    return ids


def next_prompt(prompt: list[int], completion: list[int], observation: int) -> list[int]:
    """The conversation so far and what the env says."""
    return [*prompt, *completion, *range(1, observation + 1)]


def measure(plan: dict[str, Any]) -> dict[int, list[float]]:
    """Seconds of `Engine.generate` by concurrency, one call a turn with the prompts of all episodes."""
    import sglang

    engine = sglang.Engine(model_path=plan["model"], **plan["server_args"])
    params = {"max_new_tokens": plan["output"], "temperature": 1.0}

    def batch(episodes: int, repeat: int) -> float:
        prompts = [first_prompt(number, repeat, plan["prompt"]) for number in range(episodes)]
        start = time.perf_counter()
        for _ in range(plan["turns"]):
            replies = engine.generate(input_ids=prompts, sampling_params=params, return_logprob=True)
            assert all(len(reply["output_ids"]) == plan["output"] for reply in replies)
            prompts = [
                next_prompt(prompt, reply["output_ids"], plan["observation"])
                for prompt, reply in zip(prompts, replies, strict=True)
            ]
        return time.perf_counter() - start

    try:
        seconds: dict[int, list[float]] = {}
        for episodes in plan["concurrency"]:
            batch(episodes, 1000)  # compiles, captures and warms up
            seconds[episodes] = [batch(episodes, repeat) for repeat in range(plan["repeats"])]
            print(f"Engine.generate, {episodes}: {seconds[episodes]}", flush=True)
        return seconds
    finally:
        engine.shutdown()


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(measure(json.loads(Path(sys.argv[1]).read_text()))))
