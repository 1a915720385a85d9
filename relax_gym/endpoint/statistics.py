"""Records of episodes → the numbers of an evaluation, with how far they can be trusted. Pure functions."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

NEEDED = ("slot", "attempt", "fault", "correct", "reward", "usage", "seconds", "stop_reason")
Record = Mapping[str, Any]
Estimate = dict[str, float | int | None]
"""`mean`, its standard error `stderr` (None for fewer than two tasks), and the number of `tasks` they are from."""


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that at least one of k attempts is right, estimated from c right ones of n ≥ k.

    The unbiased estimator 1 − C(n − c, k) / C(n, k) of Chen et al. 2021 (arXiv 2107.03374), computed exactly.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@k from c = {c} of n = {n} with k = {k}; 0 <= c <= n and 1 <= k <= n must hold")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def estimate(of_tasks: Sequence[float]) -> Estimate | None:
    """The mean over tasks and its standard error: attempts at one task are alike, so tasks are what counts."""
    tasks = len(of_tasks)
    if not tasks:
        return None
    mean = math.fsum(of_tasks) / tasks
    spread = math.fsum((value - mean) ** 2 for value in of_tasks)
    return {"mean": mean, "stderr": math.sqrt(spread / (tasks - 1) / tasks) if tasks > 1 else None, "tasks": tasks}


def in_short(record: Mapping[str, Any]) -> Record:
    """Of a line of episodes.jsonl, what `summarise` needs: many episodes do not fit into memory whole."""
    return {**{key: record[key] for key in NEEDED}, "turns": len(record["turns"])}


def summarise(records: Iterable[Record], ks: Sequence[int]) -> dict[str, Any]:
    """What results.json says of these records, each `in_short`.

    An episode whose requests failed says nothing about the model: it is counted in `errors`, and nowhere else. One
    whose env failed is not solved, and has no reward. `accuracy` and `pass@k` are None where no env reports
    `info["correct"]`; a task with fewer than k attempts that count is left out of pass@k.
    """
    records = list(records)
    counting = [record for record in records if record["fault"] != "request"]
    reports = any(record["correct"] is not None for record in counting)
    solved = _by_task(counting, lambda r: float(r["fault"] is None and bool(r["correct"]))) if reports else []
    rewards = _by_task([record for record in counting if record["reward"] is not None], lambda r: float(r["reward"]))
    return {
        "tasks": len({record["slot"] for record in records}),
        "episodes": len(records),
        "errors": {kind: sum(record["fault"] == kind for record in records) for kind in ("request", "env")},
        "unscored": sum(record["reward"] is None for record in counting),
        "reward": estimate([_mean(values) for values in rewards]),
        "accuracy": estimate([_mean(values) for values in solved]),
        "pass@k": {str(k): estimate([pass_at_k(len(v), round(sum(v)), k) for v in solved if len(v) >= k]) for k in ks},
        "turns": _mean([record["turns"] for record in counting]) if counting else None,
        "prompt_tokens": sum(record["usage"]["prompt"] for record in records),
        "completion_tokens": sum(record["usage"]["completion"] for record in records),
        "seconds": math.fsum(record["seconds"] for record in records),
        "stop": dict(sorted(Counter(record["stop_reason"] for record in records).items())),
    }


def _by_task(records: Sequence[Record], value: Any) -> list[list[float]]:
    found: defaultdict[int, list[float]] = defaultdict(list)
    for record in sorted(records, key=lambda record: (record["slot"], record["attempt"])):
        found[record["slot"]].append(value(record))
    return list(found.values())


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
