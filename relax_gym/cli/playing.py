"""Plays one episode without a model: `envs play` and `envs show` watch an env this way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from relax_gym.env import StepResult
from relax_gym.env_driver import EnvDriver, EnvFailure
from relax_gym.errors import ConfigError, EnvError
from relax_gym.types import Message, Task, Tool
from relax_gym.workers import WorkerThreads

Policy = Callable[[EnvDriver], Awaitable[str | None]]
"""What to say now; None leaves the episode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spectator:
    """Is told what happens as it happens."""

    on_observation: Callable[[list[Message]], None] = lambda observation: None
    on_action: Callable[[str], None] = lambda action: None
    on_result: Callable[[StepResult], None] = lambda result: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What an env brings besides episodes."""

    tools: list[Tool]
    expert: bool


async def expert(driver: EnvDriver) -> str:
    """The env's own expert as a policy.

    Raises:
        EnvError: it has none.
    """
    if not driver.offers("expert_action"):
        raise EnvError(f"env {driver.task.env_id!r} has no expert; give it a method expert_action() -> str")
    return await driver.act("expert_action")


async def nobody(driver: EnvDriver) -> None:
    """Leaves the episode at its first observation."""


def look(task: Task, *, step_timeout: float = 60.0) -> Offer:
    """Build the env, see what it offers and close it.

    Raises:
        ConfigError: the constructor says that its arguments are wrong.
        EnvError: anything else went wrong; names the env.
    """
    return asyncio.run(_look(task, step_timeout))


def play(
    task: Task, policy: Policy, spectator: Spectator, *, max_turns: int = 1000, step_timeout: float = 60.0
) -> float:
    """Play until the env ends the episode, the policy returns None or `max_turns`; returns the sum of rewards.

    Raises:
        EnvError: the env raised, hung or returned nonsense; names env id, seed and turn.
    """
    return asyncio.run(_play(task, policy, spectator, max_turns, step_timeout))


async def _look(task: Task, step_timeout: float) -> Offer:
    async with _driving(task, step_timeout) as driver:
        try:
            await driver.build()
            return Offer(tools=driver.tools(), expert=driver.offers("expert_action"))
        except EnvFailure as failure:
            if isinstance(failure.__cause__, ConfigError):
                raise failure.__cause__ from None
            raise EnvError(f"env {task.env_id!r}: {failure}") from failure.__cause__


async def _play(task: Task, policy: Policy, spectator: Spectator, max_turns: int, step_timeout: float) -> float:
    total, turn = 0.0, 0
    async with _driving(task, step_timeout) as driver:
        try:
            observation, _ = await driver.reset()
            spectator.on_observation(observation)
            while turn < max_turns and (action := await policy(driver)) is not None:
                turn += 1
                spectator.on_action(action)
                result = await driver.step(action)
                total += float(result.reward)
                spectator.on_result(result)
                spectator.on_observation(result.observation)
                if result.terminated or result.truncated:
                    break
        except EnvFailure as failure:
            raise EnvError(f"env {task.env_id!r}, seed {task.seed}, turn {turn}: {failure}") from failure.__cause__
    return total


@asynccontextmanager
async def _driving(task: Task, step_timeout: float) -> AsyncIterator[EnvDriver]:
    threads = WorkerThreads("env")
    driver = EnvDriver(task, threads, step_timeout)
    try:
        yield driver
    finally:
        await driver.close()
        threads.close()
