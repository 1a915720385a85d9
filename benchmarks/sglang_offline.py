"""What `sglang_rollouts.py` compares with: SGLang's own offline engine, in a process that has nothing else.

It runs under the interpreter that has SGLang, so it imports nothing of ours.

    python benchmarks/sglang_offline.py WORK.json RESULT.json
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any


def random_ids(name: str, length: int, vocabulary: int) -> list[int]:
    """Token ids, the same for the same name."""
    return random.Random(name).choices(range(vocabulary), k=length)


def play(engine: Any, work: dict[str, Any], concurrency: int, name: str) -> tuple[float, int, int]:
    """All turns of all episodes, one call for each turn: seconds, and tokens of prompts read and cached after the
    first turn."""
    size, length = work["vocabulary"], work["output"]
    prompts = [random_ids(f"{name}/{episode}", work["prompt"], size) for episode in range(concurrency)]
    read = cached = 0
    start = time.perf_counter()
    for turn in range(work["turns"]):
        replies = engine.generate(
            input_ids=prompts,
            sampling_params={"max_new_tokens": length, "temperature": 1.0, "skip_special_tokens": False},
            return_logprob=True,
            logprob_start_len=-1,
        )
        for episode, reply in enumerate(replies):
            meta = reply["meta_info"]
            got = [entry[1] for entry in meta["output_token_logprobs"]]
            if len(got) != length:
                raise SystemExit(f"a completion has {len(got)} tokens, not {length}: {meta['finish_reason']}")
            read += len(prompts[episode]) if turn else 0
            cached += meta["cached_tokens"] if turn else 0
            more = random_ids(f"{name}/{episode}/{turn}", work["observation"], size)
            prompts[episode] = [*prompts[episode], *got, *more]
    return time.perf_counter() - start, read, cached


def main() -> None:
    """Play each concurrency, the first time without counting it."""
    import sglang

    work = json.loads(Path(sys.argv[1]).read_text())
    engine = sglang.Engine(model_path=work["model"], **work["server_args"])
    result: dict[str, Any] = {}
    for concurrency in work["concurrency"]:
        runs = [play(engine, work, concurrency, f"{concurrency}-{n}") for n in range(work["repeats"] + 1)][1:]
        read, cached = sum(run[1] for run in runs), sum(run[2] for run in runs)
        result[str(concurrency)] = {
            "seconds": [run[0] for run in runs],
            "cache_hit_rate": cached / read if read else None,
        }
    Path(sys.argv[2]).write_text(json.dumps(result))
    engine.shutdown()


if __name__ == "__main__":
    main()
