"""Finished episodes, scored again: of a run folder, of a JSONL file, or one text. No env is played."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from numbers import Real
from pathlib import Path
from typing import Any

from relax_gym.errors import ConfigError, RunFolderError, reason
from relax_gym.lines import read_lines
from relax_gym.plugins import plugins
from relax_gym.registry import check_kwargs
from relax_gym.scoring import WeightedReward, close_rewards, make_reward, score, score_group
from relax_gym.types import (
    Completion,
    EpisodeError,
    FinishReason,
    StopReason,
    Task,
    Trajectory,
    Turn,
)
from relax_gym.workers import WorkerThreads

CONCURRENCY = 256
FIELDS = ("question", "answer", "reference", "info", "label", "id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An episode; how it was scored when it was played, and what somebody says it should get, each None without.

    Those with the same `group` are the episodes of one task, which rewards of groups score together.
    """

    trajectory: Trajectory
    group: str
    recorded: float | None = None
    label: float | None = None


def text_case(
    answer: str, *, reference: Any = None, question: str = "", info: Mapping[str, Any] | None = None, **known: Any
) -> Case:
    """One answer as an episode of one turn. The reference goes where rewards look for it, to `info["answer"]`.

    `known` are `label` and `id`.
    """
    completion = Completion(token_ids=(), logprobs=(), versions=(), finish_reason=FinishReason.STOP)
    observation = ({"role": "user", "content": question},) if question else ()
    turn = Turn(observation=observation, context_ids=(), completion=completion, text=answer, action=answer, reward=0.0)
    trajectory = Trajectory(
        task=Task(env_id="text", seed=0),
        episode_id=str(known.get("id", "text")),
        turns=(turn,),
        stop_reason=StopReason.ENV_DONE,
        info={**({} if reference is None else {"answer": reference}), **(info or {})},
    )
    return Case(
        trajectory=trajectory, group=json.dumps([question, trajectory.info], default=repr), label=known.get("label")
    )


def read_cases(source: Path, *, step: int | None = None, kind: str | None = None) -> list[Case]:
    """The episodes of a run folder, or the lines of a JSONL file. `step` and `kind` choose some of a run's.

    A line is an episode as in `episodes.jsonl`, or an object with `answer`, and `question`, `reference`, `info`,
    `label` (a number, or true or false) and `id` if there are such.

    Raises:
        RunFolderError: there is nothing, or a line is neither; names it.
    """
    if source.is_dir():
        records = read_lines(source / "episodes.jsonl")
        chosen = [r for r in records if step in (None, r.get("step")) and kind in (None, r.get("kind"))]
        if not chosen:
            steps, kinds = ({str(r.get(key)) for r in records} for key in ("step", "kind"))
            there = f"steps {', '.join(sorted(steps))} of kind {', '.join(sorted(kinds))}" if records else "none"
            raise RunFolderError(f"{str(source)!r} has no such episodes; it has {there}")
        return [_case(record, f"{source / 'episodes.jsonl'}, record {at}") for at, record in enumerate(chosen, 1)]
    if not source.is_file():
        raise RunFolderError(f"{str(source)!r} is neither a run folder nor a file; give one of them, or --answer TEXT")
    cases = [_case(record, f"{source}, record {at}") for at, record in enumerate(_lines(source), 1)]
    if not cases:
        raise RunFolderError(f"{str(source)!r} is empty; give a file with one JSON object in each line")
    return cases


def _lines(path: Path) -> Iterable[Any]:
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError as error:
                raise RunFolderError(f"{path}, line {number} is not JSON: {error}; repair or delete it") from error


def _case(record: Any, where: str) -> Case:
    if isinstance(record, Mapping) and "turns" in record:
        try:
            return Case(
                trajectory=trajectory_of(record),
                group=_group(record),
                recorded=record.get("reward"),
                label=_label(record.get("label"), where),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise RunFolderError(f"{where} is no whole episode: {type(error).__name__}: {error}") from error
    if not isinstance(record, Mapping) or not isinstance(record.get("answer"), str):
        raise RunFolderError(f"{where} is {str(record)[:80]!r}; it must be an object with a text as `answer`")
    if unknown := sorted(record.keys() - set(FIELDS)):
        raise RunFolderError(f"{where} has {unknown[0]!r}; known are {', '.join(FIELDS)}: put others into `info`")
    if not isinstance(record.get("info", {}), Mapping):
        raise RunFolderError(f"{where} has info {record['info']!r:.80}; it must be an object")
    return text_case(**{"id": where.rpartition(" ")[2], **record, "label": _label(record.get("label"), where)})


def _group(record: Mapping[str, Any]) -> str:
    """As it was played, else all there is of the same task in its step."""
    played = [record.get("step"), record.get("kind")]
    if record.get("group_id") is not None:
        return json.dumps([*played, record["group_id"]])
    return json.dumps([*played, *(record.get(key) for key in ("env_id", "seed", "kwargs", "options", "mixture"))])


def _label(label: Any, where: str) -> float | None:
    if label is not None and not isinstance(label, Real):
        raise RunFolderError(f"{where} has label {label!r:.80}; it must be a number, true or false")
    return None if label is None else float(label)


def trajectory_of(record: Mapping[str, Any]) -> Trajectory:
    """The episode that `run_folder.episode_record` wrote; media are what the line says of them."""
    error = record.get("error")
    turns = tuple(_turn(turn) for turn in record["turns"])
    info: dict[str, Any] = record.get("info") or {key: v for turn in turns for key, v in turn.info.items()}
    return Trajectory(
        task=Task(
            env_id=record["env_id"],
            seed=record["seed"],
            kwargs=record.get("kwargs") or {},
            options=record.get("options"),
            mixture=record.get("mixture", 0),
        ),
        episode_id=record["episode_id"],
        turns=turns,
        stop_reason=StopReason(record["stop_reason"]),
        final_observation=tuple(record.get("final_observation") or ()),
        info=info,
        error=error and EpisodeError(seed=record["seed"], **error),
    )


def _turn(turn: Mapping[str, Any]) -> Turn:
    return Turn(
        observation=tuple(turn["observation"]),
        context_ids=tuple(turn["context_ids"]),
        completion=Completion(
            token_ids=tuple(turn["token_ids"]),
            logprobs=tuple(value or 0.0 for value in turn["logprobs"]),
            versions=tuple(turn["versions"]),
            finish_reason=FinishReason(turn["finish_reason"]),
        ),
        text=turn["text"],
        action=turn["action"],
        reward=turn["reward"],
        new_segment=turn["new_segment"],
        info=turn["info"],
    )


def load_reward(name: str, kwargs: Mapping[str, Any], *, key: str | None = None) -> WeightedReward:
    """A registered reward with weight 1. Raises ConfigError when it refuses its options."""
    factory = plugins().get("reward", name)
    check_kwargs("reward", name, factory, kwargs)
    try:
        reward = make_reward(factory, kwargs)
    except Exception as error:  # a constructor is anybody's code
        raise ConfigError(f"reward {name!r}: {reason(error)}; `relax-gym rewards show {name}` lists options") from error
    return WeightedReward(name=name, weight=1.0, key=key or getattr(reward, "key", None), reward=reward)


def rescore(cases: Sequence[Case], term: WeightedReward, *, timeout: float) -> list[Trajectory]:
    """The episodes with what this reward gives them, in order; afterwards it is closed."""
    return asyncio.run(_rescore(cases, term, timeout))


async def _rescore(cases: Sequence[Case], term: WeightedReward, timeout: float) -> list[Trajectory]:
    turns, threads = asyncio.Semaphore(CONCURRENCY), WorkerThreads("reward")
    groups: defaultdict[str, list[int]] = defaultdict(list)
    for place, case in enumerate(cases):
        groups[case.group].append(place)

    async def one(case: Case) -> Trajectory:
        async with turns:
            return await score(case.trajectory, [term], timeout=timeout, threads=threads)

    async def together(scored: Sequence[Trajectory]) -> list[Trajectory]:
        async with turns:
            return await score_group(scored, [term], timeout=timeout, threads=threads)

    try:
        scored = await asyncio.gather(*map(one, cases))
        found = await asyncio.gather(*(together([scored[at] for at in places]) for places in groups.values()))
        by_place = dict(zip(chain(*groups.values()), chain(*found), strict=True))
        return [by_place[at] for at in range(len(cases))]
    finally:
        await close_rewards([term], timeout=timeout, threads=threads)
        threads.close()
