"""The only place where an environment and a sampler meet: one episode, turn by turn."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from relax_gym.env import StepResult
from relax_gym.env_driver import EnvDriver, EnvFailure
from relax_gym.errors import MediaError, TemplateError
from relax_gym.media.loader import MediaLoader
from relax_gym.sampler import SamplingParams, Session
from relax_gym.tasks import derive_seed
from relax_gym.timeline import now, span
from relax_gym.types import EpisodeError, FinishReason, Message, StopReason, Task, Trajectory, Turn
from relax_gym.waits import waiting
from relax_gym.workers import WorkerThreads, within

if TYPE_CHECKING:
    from relax_gym.chat import ChatRenderer, Context, Conversation

log = logging.getLogger("relax_gym")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What ends an episode besides its env. Times in seconds, `max_context` in tokens."""

    max_turns: int
    max_context: int
    step_timeout: float = 60.0
    episode_timeout: float = 1800.0


class Turnstile:
    """Lets only a few tasks go on in one pass of the event loop, in the order they came.

    What an episode does between two awaits (render a prompt, build an async env) is short, but a thousand episodes that
    are ready together would keep the loop from everybody else for all of theirs.
    """

    def __init__(self, per_pass: int = 8) -> None:
        self._places = asyncio.Semaphore(per_pass)

    async def enter(self) -> None:
        """Wait for a place, and keep it until the loop has come round once more."""
        async with self._places:
            await asyncio.sleep(0)


async def rollout(
    task: Task,
    *,
    episode_id: str,
    open_session: Callable[[EnvDriver], Session],
    renderer: ChatRenderer,
    params: SamplingParams,
    limits: Limits,
    threads: WorkerThreads,
    loader: MediaLoader,
    turnstile: Turnstile | None = None,
) -> Trajectory:
    """Play one episode. Whatever the env does, a Trajectory comes back with all turns so far; it is not scored yet.

    `open_session` is called once the env is reset. A fault of the env is logged here, whoever asked for the episode.
    `loader` reads images, videos and audio. Turn t samples with a seed derived from `params.seed` and t. Closing the
    session is the caller's business. Episodes that are played side by side share a `turnstile`, which keeps the event
    loop responsive.

    Raises:
        Whatever is no fault of the env: SamplerError, cancellation, a bug of ours. The env is closed all the same.
    """
    episode = _Episode(task, open_session, renderer, params, limits, threads, loader, turnstile or Turnstile())
    error: EpisodeError | None = None
    start = now()
    try:
        async with asyncio.timeout(limits.episode_timeout) as clock:
            stop = await episode.play()
    except TimeoutError:
        if not clock.expired():
            raise
        stop = StopReason.TIMEOUT
    except (EnvFailure, TemplateError, MediaError) as raised:
        stop = StopReason.TIMEOUT if isinstance(raised, EnvFailure) and raised.timed_out else StopReason.ERROR
        error = episode.report(raised)
    finally:
        await episode.driver.close()
    return Trajectory(
        task=task,
        episode_id=episode_id,
        turns=tuple(episode.turns),
        stop_reason=stop,
        final_observation=tuple(episode.observation),
        info=episode.info,
        error=error,
        seconds=now() - start,
    )


class _Episode:
    def __init__(
        self,
        task: Task,
        open_session: Callable[[EnvDriver], Session],
        renderer: ChatRenderer,
        params: SamplingParams,
        limits: Limits,
        threads: WorkerThreads,
        loader: MediaLoader,
        turnstile: Turnstile,
    ) -> None:
        self.driver = EnvDriver(task, threads, limits.step_timeout)
        self.turns: list[Turn] = []
        self.observation: list[Message] = []
        self.info: dict[str, object] = {}
        self._open_session = open_session
        self._renderer = renderer
        self._params = params
        self._limits = limits
        self._loader = loader
        self._turnstile = turnstile

    def report(self, raised: EnvFailure | TemplateError | MediaError) -> EpisodeError:
        """Say in the log what went wrong, and where."""
        task, cause = self.driver.task, raised.__cause__ or raised
        error = EpisodeError(
            env_id=task.env_id,
            seed=task.seed,
            turn=len(self.turns),
            message=str(raised),
            traceback="".join(traceback.format_exception(cause)),
        )
        log.warning(
            "env %s, seed %d, turn %d: %s\n%s", error.env_id, error.seed, error.turn, error.message, error.traceback
        )
        return error

    async def play(self) -> StopReason:
        await self._turnstile.enter()
        self.observation, self.info = await self.driver.reset()
        session = self._open_session(self.driver)
        conversation = self._renderer.conversation(self.driver.tools())
        while True:
            self.observation = await self._loader.load(self.observation)
            await self._turnstile.enter()
            context = conversation.observe(self.observation)
            room = self._limits.max_context - len(conversation.token_ids)
            if room < 1:
                return StopReason.TOKEN_BUDGET if self.turns else StopReason.PROMPT_TOO_LONG
            answer = await self._answer(session, conversation, context, room)
            self.turns.append(answer)
            self.observation = []
            if answer.completion.finish_reason is FinishReason.ABORT:
                return StopReason.ABORT
            result = await self.driver.step(answer.action)
            self._record(result)
            stop = self._stop(result, room)
            if stop is not None:
                return stop

    async def _answer(self, session: Session, conversation: Conversation, context: Context, room: int) -> Turn:
        params = dataclasses.replace(
            self._params,
            max_new_tokens=min(self._params.max_new_tokens, room),
            seed=None if self._params.seed is None else derive_seed(self._params.seed, len(self.turns)),
        )
        start, turn, task = now(), len(self.turns), self.driver.task
        with waiting("the sampler", f"env {task.env_id}, seed {task.seed}, turn {turn}"), span("sample", turn=turn):
            completion = await within(None, session.generate(conversation.token_ids, params, conversation.media))
        seconds = now() - start
        text = self._renderer.decode(completion.token_ids)
        conversation.complete(completion.token_ids, text)
        return Turn(
            observation=tuple(self.observation),
            context_ids=context.context_ids,
            new_segment=context.new_segment,
            media=context.media,
            completion=completion,
            text=text,
            action=self._renderer.action(text, params.stop, opened=conversation.opened_thinking),
            sample_seconds=seconds,
        )

    def _record(self, result: StepResult) -> None:
        self.observation = result.observation
        self.info = {**self.info, **result.info}
        self.turns[-1] = dataclasses.replace(
            self.turns[-1], reward=float(result.reward), info=result.info, env_seconds=self.driver.seconds
        )

    def _stop(self, result: StepResult, room: int) -> StopReason | None:
        if result.terminated:
            return StopReason.ENV_DONE
        if result.truncated:
            return StopReason.ENV_TRUNCATED
        cut = self.turns[-1].completion.finish_reason is FinishReason.LENGTH
        if cut and room <= self._params.max_new_tokens:
            return StopReason.LENGTH
        if len(self.turns) >= self._limits.max_turns:
            return StopReason.MAX_TURNS
        return None
