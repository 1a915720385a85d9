"""Held-out episodes of an env, several attempts at each, played by a model behind an endpoint."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from relax_gym.build import build_rewards
from relax_gym.cleanup import Cleanup, closed_on_failure
from relax_gym.config import RunConfig, parse_config
from relax_gym.endpoint.client import Endpoint, EndpointConfig, EndpointError, base_url
from relax_gym.endpoint.episode import Played, play
from relax_gym.endpoint.folder import EvalFolder
from relax_gym.endpoint.statistics import summarise
from relax_gym.errors import ConfigError, first_cause
from relax_gym.media.loader import MediaLoader
from relax_gym.preflight import probe_envs
from relax_gym.registry import spec
from relax_gym.reward import is_group_reward
from relax_gym.run_folder import episode_record
from relax_gym.scoring import WeightedReward, close_rewards, score
from relax_gym.tasks import TaskSource, derive_seed
from relax_gym.types import Task
from relax_gym.workers import WorkerThreads

log = logging.getLogger("relax_gym")
GIVE_UP_AFTER = 16
"""Failed requests in a row, each after all its retries, that end an evaluation: nobody is there any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointEval:
    """What to evaluate.

    Attributes:
        seed: number of the first held-out episode; 0 begins with the ones that evaluation of a training run plays.
        all_rows: play all rows of an env that has rows, not only those that training holds out.
        send_seed: send a seed with every request, for servers whose sampling follows it.
    """

    env: str
    endpoint: EndpointConfig
    out: Path
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    all_rows: bool = False
    rewards: tuple[str, ...] = ("env",)
    episodes: int = 100
    seed: int = 0
    attempts: int = 1
    ks: tuple[int, ...] = (1,)
    max_turns: int = 8
    send_seed: bool = True
    concurrency: int = 16

    def __post_init__(self) -> None:
        if too_large := [k for k in self.ks if not 1 <= k <= self.attempts]:
            raise ConfigError(
                f"--k {too_large[0]} with --attempts {self.attempts}: pass@k needs at least k attempts at each task"
            )

    def settings(self) -> dict[str, dict[str, Any]]:
        """What decides how episodes go. It is kept in the folder, and must be the same to resume."""
        return {
            "endpoint": {
                "url": base_url(self.endpoint.url),
                "model": self.endpoint.model,
                "body": dict(self.endpoint.body),
                "send_seed": self.send_seed,
            },
            "env": {"id": self.env, "kwargs": dict(self.kwargs), "all_rows": self.all_rows},
            "eval": {
                "episodes": self.episodes,
                "seed": self.seed,
                "attempts": self.attempts,
                "max_turns": self.max_turns,
                "rewards": list(self.rewards),
            },
        }


def evaluate_endpoint(
    evaluation: EndpointEval,
    *,
    resume: bool = False,
    on_end: Callable[[int, int], None] = lambda done, total: None,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> dict[str, Any]:
    """Play what is not played yet, write results.json into the folder and return what it says.

    `on_end` is told how many episodes are finished, and of how many. Interrupting loses unfinished episodes only.

    Raises:
        ConfigError: env, reward, key or URL are wrong, or there are no episodes to play.
        RunFolderError: the folder holds something else.
        EndpointError: the endpoint refuses requests, or nobody answers.
    """
    config = _run_config(evaluation)
    tasks = _tasks(evaluation, config)
    endpoint = Endpoint(evaluation.endpoint, sleep=sleep)
    probe_envs(config)
    with closed_on_failure() as built:
        rewards = build_rewards(config)
        built.add(partial(close_rewards, rewards, timeout=config.rollout.reward_timeout))
        _refuse_groups(rewards, evaluation.out)
        folder = EvalFolder(evaluation.out, evaluation.settings(), resume=resume)
    start = time.perf_counter()
    try:
        asyncio.run(_Evaluation(evaluation, config, tasks, endpoint, rewards, folder, on_end).run())
    except ExceptionGroup as group:
        raise first_cause(group) from group
    results = {**summarise(folder.records, evaluation.ks), "wall_seconds": time.perf_counter() - start}
    folder.write_results({**evaluation.settings(), "results": results})
    return results


def _run_config(evaluation: EndpointEval) -> RunConfig:
    """As a run that trains nothing: it has the same checks, and the same limits by default."""
    kwargs = dict(evaluation.kwargs)
    return parse_config(
        {
            "model": {"name": evaluation.endpoint.model},
            "env": [{"id": evaluation.env, "kwargs": kwargs, "eval_kwargs": kwargs if evaluation.all_rows else {}}],
            "reward": [{"name": name} for name in evaluation.rewards],
            "rollout": {"max_turns": evaluation.max_turns},
            "train": {"steps": 0, "groups_per_step": 1, "group_size": 2},
            "trackers": [],
        },
        source="eval",
    )


def _tasks(evaluation: EndpointEval, config: RunConfig) -> list[Task]:
    if evaluation.all_rows and not evaluation.kwargs:
        raise ConfigError("--all-rows without --set: name the rows in the env's own arguments, such as --set path=…")
    last = evaluation.seed + evaluation.episodes
    source = TaskSource(config.env, seed=0, eval_episodes=last)
    tasks = source.eval_tasks()[evaluation.seed :]
    if not tasks:
        raise ConfigError(f"--seed {evaluation.seed}: env {evaluation.env!r} has no more held-out rows than that")
    if len(tasks) < evaluation.episodes and not evaluation.all_rows:
        hint = "; --all-rows plays those of training, too" if hasattr(spec(evaluation.env).load(), "tasks") else ""
        log.warning("env %r has %d held-out rows from --seed on, which are played%s", evaluation.env, len(tasks), hint)
    return tasks


def _refuse_groups(rewards: Sequence[WeightedReward], out: Path) -> None:
    """Attempts at a task may be played in different runs of the command, so no reward sees them side by side."""
    for term in rewards:
        if is_group_reward(term.reward):
            raise ConfigError(
                f"--reward {term.name} scores groups of episodes; leave it out and, when all attempts are played, run: "
                f"relax-gym rewards try {term.name} {out}"
            )


class _Evaluation:
    def __init__(
        self,
        evaluation: EndpointEval,
        config: RunConfig,
        tasks: list[Task],
        endpoint: Endpoint,
        rewards: tuple[WeightedReward, ...],
        folder: EvalFolder,
        on_end: Callable[[int, int], None],
    ) -> None:
        self._evaluation, self._config, self._tasks = evaluation, config, tasks
        self._endpoint, self._rewards, self._folder, self._on_end = endpoint, rewards, folder, on_end
        self._threads, self._reward_threads = WorkerThreads("env"), WorkerThreads("reward", limit=16)
        self._loader = MediaLoader(config.media)
        self._total = len(tasks) * evaluation.attempts

    async def run(self) -> None:
        """Play all pairs of task and attempt that the folder does not have."""
        async with Cleanup() as cleanup:
            cleanup.add(self._endpoint.aclose)
            cleanup.add(self._close)
            pairs = self._missing()
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self._evaluation.concurrency, self._total)):
                    group.create_task(self._work(pairs))

    async def _close(self) -> None:
        timeout = self._config.rollout.reward_timeout
        await close_rewards(self._rewards, timeout=timeout, threads=self._reward_threads)
        self._loader.close()
        self._threads.close()
        self._reward_threads.close()
        await asyncio.to_thread(self._folder.close)

    def _missing(self) -> Iterator[tuple[int, int]]:
        done = {(record["slot"], record["attempt"]) for record in self._folder.records}
        pairs = ((slot, attempt) for slot in range(len(self._tasks)) for attempt in range(self._evaluation.attempts))
        return (pair for pair in pairs if pair not in done)

    async def _work(self, pairs: Iterator[tuple[int, int]]) -> None:
        for slot, attempt in pairs:
            played = await self._play(slot, attempt)
            self._judge(played)
            self._folder.add(_record(played, slot, attempt))
            self._on_end(len(self._folder.records), self._total)

    async def _play(self, slot: int, attempt: int) -> Played:
        number = self._evaluation.seed + slot
        played = await play(
            self._tasks[slot],
            self._endpoint,
            episode_id=f"task-{number}-attempt-{attempt}",
            max_turns=self._evaluation.max_turns,
            seed=derive_seed("eval", number, attempt) if self._evaluation.send_seed else None,
            step_timeout=self._config.rollout.step_timeout,
            threads=self._threads,
            loader=self._loader,
        )
        timeout = self._config.rollout.reward_timeout
        scored = await score(played.trajectory, self._rewards, timeout=timeout, threads=self._reward_threads)
        return played.with_trajectory(scored)

    def _judge(self, played: Played) -> None:
        """Raise when what failed would fail for all others, too: nobody has been answered, or nobody is any more."""
        if played.fault != "request":
            return
        assert isinstance(played.cause, EndpointError)
        if not self._endpoint.answered or played.cause.for_all:
            raise played.cause
        if (failed := self._endpoint.failed_in_row) >= GIVE_UP_AFTER:
            raise EndpointError(f"{failed} requests in a row have failed; continue with --resume. {played.cause}")
        log.warning("%s is an error: %s", played.trajectory.episode_id, played.cause)


def _record(played: Played, slot: int, attempt: int) -> dict[str, Any]:
    """A line of episodes.jsonl: what a training run writes, and what an endpoint adds to it."""
    record = episode_record(played.trajectory)
    correct = played.trajectory.info.get("correct")
    for turn, seconds in zip(record["turns"], (turn.sample_seconds for turn in played.trajectory.turns), strict=True):
        turn["sample_seconds"] = seconds
    return {
        "step": 0,
        "kind": "eval",
        "group_id": f"task-{slot}",
        "slot": slot,
        "attempt": attempt,
        "correct": None if correct is None else bool(correct),
        "fault": played.fault,
        "usage": {"prompt": played.usage.prompt, "completion": played.usage.completion},
        "seconds": played.seconds,
        **record,
    }
