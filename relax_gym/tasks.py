"""Which task a group plays. A pure function of (run seed, slot, attempt), so a resumed run needs no cursor."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from relax_gym.config import EnvConfig
from relax_gym.errors import ConfigError
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

    Envs backed by rows go through every row once an epoch, in an order shuffled by the run's seed. Without
    `eval_kwargs` the last `eval_episodes` rows of a shuffled list are held out of training.
    """

    def __init__(self, envs: Sequence[EnvConfig], *, seed: int, eval_episodes: int) -> None:
        self._seed = seed
        self._eval_episodes = eval_episodes
        self._mixture = [self._load(env) for env in envs]
        self._choices: list[tuple[int, int]] = []  # for each slot: which env, and how many slots of it came before
        self._counts = [0] * len(envs)

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

    def eval_tasks(self) -> list[Task]:
        """The held-out tasks, the same ones at every evaluation."""
        tasks = []
        for mixture, env in enumerate(self._mixture):
            kwargs = {**env.config.kwargs, **env.config.eval_kwargs}
            for index in range(self._eval_episodes):
                seed = EVAL_SEEDS + derive_seed("eval", env.config.id, index)
                options = env.eval_rows[index % len(env.eval_rows)] if env.eval_rows else None
                tasks.append(Task(env_id=env.config.id, seed=seed, kwargs=kwargs, options=options, mixture=mixture))
        return tasks

    def _load(self, env: EnvConfig) -> _Mixed:
        found = spec(env.id)
        rows_of = getattr(found.load(), "tasks", None)
        if rows_of is None:
            return _Mixed(env, None, None)
        rows = rows_of(**{**found.kwargs, **env.kwargs})
        if rows is None:
            return _Mixed(env, None, None)
        if len(rows) == 0:
            raise ConfigError(f"env {env.id!r} with {env.kwargs} has no rows to train on")
        if env.eval_kwargs:
            return _Mixed(env, rows, rows_of(**{**found.kwargs, **env.kwargs, **env.eval_kwargs}))
        if len(rows) <= self._eval_episodes:
            raise ConfigError(
                f"env {env.id!r} has {len(rows)} rows but eval.episodes = {self._eval_episodes} are to be held out; "
                "lower eval.episodes or give the evaluation rows in eval_kwargs"
            )
        order = np.random.default_rng(derive_seed(self._seed, "split", env.id)).permutation(len(rows))
        cut = len(rows) - self._eval_episodes
        return _Mixed(env, _Picked(rows, order[:cut]), _Picked(rows, order[cut:]))

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
        order = np.random.default_rng(derive_seed(self._seed, "epoch", env, epoch)).permutation(len(rows))
        return rows[int(order[position])]


class _Picked(Sequence[Mapping[str, Any]]):
    """Some rows of a sequence, in a given order, without copying them."""

    def __init__(self, rows: Rows, indices: Sequence[int] | np.ndarray[Any, Any]) -> None:
        self._rows, self._indices = rows, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: Any) -> Any:
        return self._rows[int(self._indices[index])]
