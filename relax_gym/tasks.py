"""Which task a group plays. A pure function of (run seed, slot, attempt), so a resumed run needs no cursor."""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from relax_gym.config import EnvConfig
from relax_gym.errors import ConfigError, reason
from relax_gym.registry import spec
from relax_gym.types import Task

EVAL_SEEDS = 2**31
"""Training seeds lie below, evaluation seeds at or above: they never meet."""


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2^31) that depends on all parts."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % EVAL_SEEDS


Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class _Mixed:
    config: EnvConfig
    train_rows: Rows | None
    eval_rows: Rows | None


class TaskSource:
    """Tasks of a weighted mixture of envs.

    Envs backed by rows go through every training row once an epoch, in an order shuffled by the run's seed. Evaluation
    plays each of its rows once at most: those of `eval_kwargs`, else the share `eval_fraction` of the env's own. Which
    rows that share is depends on their number and the fraction only, so no other option can move a row from one side to
    the other, and two envs over the same rows hold out the same ones.
    """

    def __init__(self, envs: Sequence[EnvConfig], *, seed: int, eval_episodes: int) -> None:
        self._seed = seed
        self._eval_episodes = eval_episodes
        self._mixture = [self._load(index, env) for index, env in enumerate(envs)]
        self._choices: list[tuple[int, int]] = []  # for each slot: which env, and how many slots of it came before
        self._counts = [0] * len(envs)
        self._order = functools.lru_cache(maxsize=2 * len(envs))(self._shuffled)

    def task(self, slot: int, attempt: int = 0, *, stream: str = "train") -> Task:
        """The task of a slot. `attempt` > 0 gives its replacements after a filter dropped the group."""
        index, count = self._choose(slot)
        env = self._mixture[index]
        seed = derive_seed(self._seed, stream, slot, attempt)
        return Task(
            env_id=env.config.id,
            seed=seed,
            kwargs=env.config.kwargs,
            options=self._row(env.train_rows, index, count, seed if attempt else None),
            mixture=index,
        )

    def mixture(self, slot: int) -> int:
        """The index of the `[[env]]` that a slot plays, whatever its attempt."""
        return self._choose(slot)[0]

    def eval_tasks(self) -> list[Task]:
        """The held-out tasks, the same ones at every evaluation."""
        tasks = []
        for mixture, env in enumerate(self._mixture):
            kwargs = {**env.config.kwargs, **env.config.eval_kwargs}
            for index in range(_episodes(self._eval_episodes, env.eval_rows)):
                seed = EVAL_SEEDS + derive_seed("eval", env.config.id, index)
                options = None if env.eval_rows is None else env.eval_rows[index]
                tasks.append(Task(env_id=env.config.id, seed=seed, kwargs=kwargs, options=options, mixture=mixture))
        return tasks

    def shortages(self) -> list[str]:
        """For each env with fewer held-out rows than `eval.episodes`: that it has, and what to do."""
        return [
            f"env {env.config.id!r} has {len(env.eval_rows)} held-out rows, so that many of eval.episodes = "
            f"{self._eval_episodes} are played; for more, raise its eval_fraction or give other rows in eval_kwargs"
            for env in self._mixture
            if env.eval_rows is not None and len(env.eval_rows) < self._eval_episodes
        ]

    def _load(self, index: int, env: EnvConfig) -> _Mixed:
        rows = load_rows(f"env.{index}.kwargs", env.id, env.kwargs)
        if rows is None:
            return _Mixed(env, None, None)
        if env.eval_kwargs:
            kwargs = {**env.kwargs, **env.eval_kwargs}
            return _Mixed(env, rows, load_rows(f"env.{index}.eval_kwargs", env.id, kwargs))
        held_out = min(max(1, round(env.eval_fraction * len(rows))), len(rows) - 1) if env.eval_fraction else 0
        if held_out == 0 and self._eval_episodes:
            raise ConfigError(
                f"env {env.id!r} with {len(rows)} rows and eval_fraction = {env.eval_fraction} has none to hold out "
                "for evaluation; raise env.eval_fraction, give the evaluation rows in eval_kwargs or set "
                "eval.episodes = 0"
            )
        order = np.random.default_rng(derive_seed("split", len(rows))).permutation(len(rows))
        return _Mixed(env, _Picked(rows, order[held_out:]), _Picked(rows, order[:held_out]))

    def _choose(self, slot: int) -> tuple[int, int]:
        weights = [env.config.weight for env in self._mixture]
        while len(self._choices) <= slot:
            rng = random.Random(derive_seed(self._seed, "mixture", len(self._choices)))
            index = rng.choices(range(len(weights)), weights)[0]
            self._choices.append((index, self._counts[index]))
            self._counts[index] += 1
        return self._choices[slot]

    def _row(self, rows: Rows | None, env: int, count: int, random_seed: int | None) -> Mapping[str, Any] | None:
        if rows is None:
            return None
        if random_seed is not None:
            return rows[random_seed % len(rows)]
        epoch, position = divmod(count, len(rows))
        return rows[int(self._order(env, epoch, len(rows))[position])]

    def _shuffled(self, env: int, epoch: int, count: int) -> np.ndarray[Any, Any]:
        return np.random.default_rng(derive_seed(self._seed, "epoch", env, epoch)).permutation(count)


def _episodes(wanted: int, rows: Rows | None) -> int:
    return wanted if rows is None else min(wanted, len(rows))


def load_rows(key: str, env_id: str, kwargs: Mapping[str, Any]) -> Rows | None:
    """The rows of an env that is backed by some. Raises ConfigError when it cannot load them, or there are none."""
    found = spec(env_id)
    rows_of = getattr(found.load(), "tasks", None)
    try:
        rows: Rows | None = None if rows_of is None else rows_of(**{**found.kwargs, **kwargs})
    except Exception as error:  # the env's own code, and the files it reads
        raise ConfigError(f"{key} = {dict(kwargs)}: env {env_id!r} cannot load its rows: {reason(error)}") from error
    if rows is not None and len(rows) == 0:
        raise ConfigError(f"{key} = {dict(kwargs)}: env {env_id!r} has no rows")
    return rows


class _Picked(Sequence[Mapping[str, Any]]):
    """Some rows of a sequence, in a given order, without copying them."""

    def __init__(self, rows: Rows, indices: Sequence[int] | np.ndarray[Any, Any]) -> None:
        self._rows, self._indices = rows, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: Any) -> Any:
        return self._rows[int(self._indices[index])]
