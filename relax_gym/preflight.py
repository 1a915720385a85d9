"""Each env is built and closed once before anything expensive is loaded: bad values surface here, by their key."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from relax_gym.config import RunConfig
from relax_gym.env_driver import EnvDriver, EnvFailure
from relax_gym.errors import ConfigError, TemplateError, reason
from relax_gym.types import Task, Tool
from relax_gym.workers import WorkerThreads

if TYPE_CHECKING:
    from relax_gym.chat import ChatRenderer


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvProbe:
    """What one env was built from, and the tools it came with, if any yet. `key` is where the config says so."""

    key: str
    task: Task
    tools: Sequence[Tool]


def probe_envs(config: RunConfig) -> list[EnvProbe]:
    """Build and close each `[[env]]` with its kwargs, and with its eval_kwargs where it has some.

    Raises:
        ConfigError: a constructor refused its arguments or took too long, or `[warmup]` finds no expert.
    """
    return asyncio.run(_probe_all(config))


def check_tools(probes: Sequence[EnvProbe], renderer: ChatRenderer) -> None:
    """Raise TemplateError, naming the env, when the chat template cannot show the tools of one."""
    for probe in probes:
        try:
            renderer.conversation(probe.tools)
        except TemplateError as error:
            raise TemplateError(f"{probe.key}: env {probe.task.env_id!r}: {error}") from error


def refused(key: str, what: str, kwargs: Mapping[str, Any], why: str) -> ConfigError:
    """The error of a constructor that did not take what the config gives it."""
    return ConfigError(f"{key} = {dict(kwargs)}: {what} cannot be built: {why}")


async def _probe_all(config: RunConfig) -> list[EnvProbe]:
    probes = []
    threads = WorkerThreads("env")
    try:
        for index, env in enumerate(config.env):
            probes.append(await _probe(f"env.{index}.kwargs", env.id, env.kwargs, config, threads))
            if env.eval_kwargs:
                kwargs = {**env.kwargs, **env.eval_kwargs}
                probes.append(await _probe(f"env.{index}.eval_kwargs", env.id, kwargs, config, threads))
    finally:
        threads.close()
    return probes


async def _probe(
    key: str, env_id: str, kwargs: Mapping[str, Any], config: RunConfig, threads: WorkerThreads
) -> EnvProbe:
    task = Task(env_id=env_id, seed=0, kwargs=kwargs)
    driver = EnvDriver(task, threads, config.rollout.step_timeout)
    try:
        await driver.build()
        if config.warmup is not None and config.warmup.steps:
            _check_expert(driver, config.warmup.expert_probability)
        return EnvProbe(key=key, task=task, tools=_tools(driver))
    except EnvFailure as failure:
        cause = failure.__cause__
        why = str(failure) if failure.timed_out or cause is None else reason(cause)
        raise refused(key, f"env {env_id!r}", kwargs, why) from failure
    finally:
        await driver.close()


def _check_expert(driver: EnvDriver, expert_probability: float) -> None:
    """Raise ConfigError unless the env can say what an expert, and other legal actions if they are wanted, would do."""
    needed = ("expert_action",) if expert_probability == 1 else ("expert_action", "random_action")
    if not all(map(driver.offers, needed)):
        assert driver.env is not None
        raise ConfigError(
            f"[warmup] needs {type(driver.env.unwrapped).__name__}.expert_action(), and random_action() if "
            "expert_probability < 1; add them, or set warmup.steps = 0"
        )


def _tools(driver: EnvDriver) -> list[Tool]:
    """The tools as far as they are known: an env need not have them before its first `reset`."""
    try:
        return driver.tools()
    except EnvFailure:
        return []
