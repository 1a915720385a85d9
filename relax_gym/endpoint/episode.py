"""One episode played by a model behind an endpoint. The counterpart of `rollout`, without token ids."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
import traceback
from dataclasses import dataclass
from typing import Literal

from relax_gym.endpoint.client import Endpoint, EndpointError, PromptTooLong
from relax_gym.endpoint.conversation import Conversation
from relax_gym.endpoint.replies import Reply, Usage
from relax_gym.env import StepResult
from relax_gym.env_driver import EnvDriver, EnvFailure
from relax_gym.errors import MediaError
from relax_gym.media.loader import MediaLoader
from relax_gym.tasks import derive_seed
from relax_gym.types import Completion, EpisodeError, Message, StopReason, Task, Trajectory, Turn
from relax_gym.workers import WorkerThreads

log = logging.getLogger("relax_gym")
Fault = Literal["request", "env"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A finished episode, not scored yet. `fault` says what made it an error; `seconds` is how long it took."""

    trajectory: Trajectory
    usage: Usage
    seconds: float
    fault: Fault | None
    cause: Exception | None

    def with_trajectory(self, trajectory: Trajectory) -> Played:
        """The same with a trajectory that is scored."""
        return dataclasses.replace(self, trajectory=trajectory)


async def play(
    task: Task,
    endpoint: Endpoint,
    *,
    episode_id: str,
    max_turns: int,
    seed: int | None,
    step_timeout: float,
    threads: WorkerThreads,
    loader: MediaLoader,
) -> Played:
    """Play one episode. Whatever env or endpoint do, all turns so far come back.

    Its turns have empty completions: an endpoint gives text. Turn t asks with a seed derived from `seed` and t.
    """
    episode = _Episode(task, endpoint, max_turns, seed, step_timeout, threads, loader)
    start = time.perf_counter()
    fault: Fault | None = None
    cause: Exception | None = None
    stop = StopReason.ERROR
    try:
        stop = await episode.play()
    except EndpointError as error:
        fault, cause = "request", error
    except (EnvFailure, MediaError) as error:
        fault, cause = "env", error
        if isinstance(error, EnvFailure) and error.timed_out:
            stop = StopReason.TIMEOUT
    finally:
        await episode.driver.close()
    trajectory = Trajectory(
        task=task,
        episode_id=episode_id,
        turns=tuple(episode.turns),
        stop_reason=stop,
        final_observation=tuple(episode.observation),
        info=episode.info,
        error=None if cause is None else episode.report(cause),
    )
    return Played(
        trajectory=trajectory, usage=episode.usage, seconds=time.perf_counter() - start, fault=fault, cause=cause
    )


class _Episode:
    def __init__(
        self,
        task: Task,
        endpoint: Endpoint,
        max_turns: int,
        seed: int | None,
        step_timeout: float,
        threads: WorkerThreads,
        loader: MediaLoader,
    ) -> None:
        self.driver = EnvDriver(task, threads, step_timeout)
        self.turns: list[Turn] = []
        self.observation: list[Message] = []
        self.info: dict[str, object] = {}
        self.usage = Usage()
        self._endpoint, self._max_turns, self._seed, self._loader = endpoint, max_turns, seed, loader

    async def play(self) -> StopReason:
        self.observation, self.info = await self.driver.reset()
        tools, conversation = self.driver.tools(), Conversation()
        while True:
            self.observation = await self._loader.load(self.observation)
            await asyncio.to_thread(conversation.observe, self.observation)  # it encodes media
            seed = None if self._seed is None else derive_seed(self._seed, len(self.turns))
            start = time.perf_counter()
            try:
                reply = await self._endpoint.complete(conversation.messages, tools, seed)
            except PromptTooLong:
                if not self._endpoint.answered:
                    raise  # more likely the evaluation is set up wrongly than that all tasks are too long
                return StopReason.TOKEN_BUDGET if self.turns else StopReason.PROMPT_TOO_LONG
            conversation.answer(reply)
            self._add(reply, time.perf_counter() - start)
            result = await self.driver.step(reply.action)
            self._record(result)
            if result.terminated:
                return StopReason.ENV_DONE
            if result.truncated:
                return StopReason.ENV_TRUNCATED
            if len(self.turns) >= self._max_turns:
                return StopReason.MAX_TURNS

    def report(self, cause: Exception) -> EpisodeError:
        """What went wrong, and where; of what is no fault of the endpoint, with its traceback, in the log too."""
        task, shown = self.driver.task, ""
        if not isinstance(cause, EndpointError):
            shown = "".join(traceback.format_exception(cause.__cause__ or cause))
            log.warning("env %s, seed %d, turn %d: %s\n%s", task.env_id, task.seed, len(self.turns), cause, shown)
        return EpisodeError(
            env_id=task.env_id, seed=task.seed, turn=len(self.turns), message=str(cause), traceback=shown
        )

    def _add(self, reply: Reply, seconds: float) -> None:
        self.usage += reply.usage
        completion = Completion(token_ids=(), logprobs=(), versions=(), finish_reason=reply.finish_reason)
        self.turns.append(
            Turn(
                observation=tuple(self.observation),
                context_ids=(),
                completion=completion,
                text=reply.text,
                action=reply.action,
                sample_seconds=seconds,
            )
        )
        self.observation = []

    def _record(self, result: StepResult) -> None:
        self.observation = result.observation
        self.info = {**self.info, **result.info}
        self.turns[-1] = dataclasses.replace(
            self.turns[-1], reward=float(result.reward), info=result.info, env_seconds=self.driver.seconds
        )
