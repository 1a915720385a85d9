"""Rewards made of rewards: their sum, their product, one behind others, the first that fails."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from relax_gym.cleanup import closed_on_failure
from relax_gym.errors import RewardError, suggestion
from relax_gym.plugins import plugins
from relax_gym.registry import check_kwargs
from relax_gym.reward import is_group_reward
from relax_gym.scoring import WeightedReward, close_rewards, make_reward, reward_metrics, score
from relax_gym.types import Trajectory
from relax_gym.workers import WorkerThreads

TERM_KEYS = ("name", "weight", "key", "kwargs")
HOUR = 3600.0


class _Composite:
    """Asks `rewards`, each a table as in `[[reward]]`. The scores of the terms are logged as `reward/<name>/<term>`."""

    key = "score"

    def __init__(self, *, rewards: Sequence[Mapping[str, Any]]) -> None:
        self._threads = WorkerThreads("reward", limit=16)
        self.terms: list[WeightedReward] = []
        with closed_on_failure() as built:
            built.add(partial(close_rewards, self.terms, timeout=HOUR))
            for term in rewards:
                self.terms.append(_build(term))
            names = [term.name for term in self.terms]
            if len(set(names)) != len(names) or not names or self.key in names:
                raise RewardError(f"rewards are {names}; give at least one, each only once, and none called {self.key}")

    async def ask(self, trajectory: Trajectory, *terms: WeightedReward) -> dict[str, float]:
        """Their weighted scores by name. Raises RewardError when one has none: the limit of time is the composite's."""
        scored = await score(trajectory, terms, timeout=HOUR, threads=self._threads)
        if scored.reward_failures:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in scored.reward_failures.items())
            raise RewardError(reasons)
        return {name: value for name, value in scored.rewards.items() if value is not None} | dict(scored.reward_parts)

    async def ask_all(self, trajectory: Trajectory) -> tuple[list[float], dict[str, float]]:
        """The weighted scores in order, and all there is to log."""
        found = await self.ask(trajectory, *self.terms)
        return [found[term.name] for term in self.terms], found

    def metrics(self) -> Mapping[str, float]:
        """What the terms count."""
        return {name.removeprefix("reward/"): value for name, value in reward_metrics(self.terms).items()}

    async def close(self) -> None:
        """Close the terms."""
        await close_rewards(self.terms, timeout=HOUR, threads=self._threads)
        self._threads.close()


class WeightedSum(_Composite):
    """The sum of the `rewards`, tables as in `[[reward]]`, each times its weight; unscored when one of them is.

    For a sum within another composite; the `[[reward]]` sections of a config are summed anyway.
    """

    async def __call__(self, trajectory: Trajectory, /) -> dict[str, float]:
        values, found = await self.ask_all(trajectory)
        return {**found, self.key: sum(values)}


class Product(_Composite):
    """The product of the `rewards`, tables as in `[[reward]]`, each times its weight; unscored when one of them is."""

    async def __call__(self, trajectory: Trajectory, /) -> dict[str, float]:
        values, found = await self.ask_all(trajectory)
        return {**found, self.key: math.prod(values)}


class _Ordered(_Composite):
    def __init__(self, *, rewards: Sequence[Mapping[str, Any]], threshold: float = 1.0) -> None:
        super().__init__(rewards=rewards)
        self.threshold = threshold

    async def failing(self, trajectory: Trajectory, found: dict[str, float]) -> WeightedReward | None:
        """Ask all but the last in order, into `found`, up to the first below the threshold, which is returned."""
        for term in self.terms[:-1]:
            found |= await self.ask(trajectory, term)
            if found[term.name] < self.threshold:
                return term
        return None


class Gate(_Ordered):
    """The last of `rewards` (tables as in `[[reward]]`) if all before it reach `threshold`, else 0.0.

    They are asked in order, and none after the first that fails.
    """

    async def __call__(self, trajectory: Trajectory, /) -> dict[str, float]:
        found: dict[str, float] = {}
        if await self.failing(trajectory, found):
            return {**found, self.key: 0.0}
        found |= await self.ask(trajectory, self.terms[-1])
        return {**found, self.key: found[self.terms[-1].name]}


class FirstFailure(_Ordered):
    """The score of the first of `rewards` (tables as in `[[reward]]`) that is below `threshold`, else of the last.

    They are asked in order, and none after the first that fails.
    """

    async def __call__(self, trajectory: Trajectory, /) -> dict[str, float]:
        found: dict[str, float] = {}
        counts = await self.failing(trajectory, found)
        if counts is None:
            counts = self.terms[-1]
            found |= await self.ask(trajectory, counts)
        return {**found, self.key: found[counts.name]}


def _build(term: Mapping[str, Any]) -> WeightedReward:
    if not isinstance(term, Mapping) or not isinstance(term.get("name"), str):
        raise RewardError(f"a term of rewards is {term!r:.100}; it must be a table with a name, as [[reward]] is")
    for key in term:
        if key not in TERM_KEYS:
            raise RewardError(f"the term {term['name']!r} of rewards has no key {key!r}{suggestion(key, TERM_KEYS)}")
    name, kwargs = term["name"], term.get("kwargs", {})
    factory = plugins().get("reward", name)
    check_kwargs("reward", name, factory, kwargs)
    reward = make_reward(factory, kwargs)
    if is_group_reward(reward):
        raise RewardError(f"the term {name!r} of rewards scores groups of episodes; give it a [[reward]] of its own")
    counts = term.get("key") or getattr(reward, "key", None)
    return WeightedReward(name=name, weight=float(term.get("weight", 1.0)), key=counts, reward=reward)
