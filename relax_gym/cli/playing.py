"""Plays one episode without a model: `envs play`, `envs show` and `--dry-run` watch an env this way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from relax_gym.env import Env, StepResult
from relax_gym.env_driver import EnvDriver, EnvFailure
from relax_gym.errors import EnvError
from relax_gym.types import Message, Task
from relax_gym.workers import WorkerThreads

Policy = Callable[[Env], str | None]
"""What to say now; None leaves the episode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spectator:
    """Is told what happens as it happens."""

    on_observation: Callable[[list[Message]], None] = lambda observation: None
    on_action: Callable[[str], None] = lambda action: None
    on_result: Callable[[StepResult], None] = lambda result: None


def expert(env: Env) -> str:
    """The env's own expert as a policy.

    Raises:
        EnvError: it has none.
    """
    method = getattr(env, "expert_action", None)
    if method is None:
        raise EnvError(f"{type(env).__name__} has no expert; give it a method expert_action() -> str")
    return str(method())


def play(
    task: Task, policy: Policy, spectator: Spectator, *, max_turns: int = 1000, step_timeout: float = 60.0
) -> float:
    """Play until the env ends the episode, the policy returns None or `max_turns`; returns the sum of rewards.

    Raises:
        EnvError: the env raised, hung or returned nonsense; names env id, seed and turn.
    """
    return asyncio.run(_play(task, policy, spectator, max_turns, step_timeout))


async def _play(task: Task, policy: Policy, spectator: Spectator, max_turns: int, step_timeout: float) -> float:
    threads = WorkerThreads("env")
    driver = EnvDriver(task, threads, step_timeout)
    total, turn = 0.0, 0
    try:
        observation, _ = await driver.reset()
        assert driver.env is not None
        spectator.on_observation(observation)
        while turn < max_turns and (action := policy(driver.env)) is not None:
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
    finally:
        await driver.close()
        threads.close()
    return total
