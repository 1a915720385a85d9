"""A model of one's own that answers as an endpoint does: any sampler serves it, beside whatever else a program does."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import tempfile
import threading
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from relax_gym.config import (
    ChatConfig,
    EnvConfig,
    ModelConfig,
    RunConfig,
    SamplerSection,
    TrainConfig,
    plugin_options,
)
from relax_gym.endpoint.client import EndpointError, PromptTooLong
from relax_gym.endpoint.replies import Reply, Usage
from relax_gym.errors import SamplerError
from relax_gym.plugins import plugins
from relax_gym.sampler import Sampler, SamplingParams
from relax_gym.types import FinishReason, Message

if TYPE_CHECKING:
    from relax_gym.chat import ChatRenderer

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Served:
    sampler: Sampler
    renderer: ChatRenderer
    folder: Path
    places: asyncio.Semaphore


class OwnModel:
    """Serves `model` with the sampler of `section` from the first `start` or `complete` until `close`.

    It has a thread with an event loop of its own, so that any thread and event loop may ask it.

    Args:
        params: how everything is sampled, but for the seed.
        template_kwargs: of the chat template.
        most: requests at once; `deadline`: seconds of one, waiting included.

    Raises:
        UnknownNameError, ConfigError: no such sampler, or options it does not take.
    """

    def __init__(
        self,
        model: ModelConfig,
        section: SamplerSection,
        params: SamplingParams,
        *,
        template_kwargs: Mapping[str, Any],
        most: int,
        deadline: float,
    ) -> None:
        plugin_options(section, plugins().get("sampler", section.name).load_options(), source="reward", key="sampler")
        self._config = RunConfig(  # what samplers are built from is the config of a run
            model=model,
            sampler=section,
            chat=ChatConfig(template_kwargs=dict(template_kwargs)),
            env=(EnvConfig(id="none"),),
            train=TrainConfig(steps=0, groups_per_step=1, group_size=1),
        )
        self._params, self._most, self._deadline = params, most, deadline
        self._lock = threading.Lock()
        self._running: tuple[asyncio.AbstractEventLoop, threading.Thread] | None = None
        self._served: asyncio.Task[_Served] | None = None

    def start(self) -> None:
        """Load the model, and return when it can be asked. Raises what the sampler raises, and is closed then."""
        try:
            self._submit(self._ready()).result()
        except BaseException:
            self.close()
            raise

    async def complete(self, messages: Sequence[Message], *, seed: int | None = None) -> Reply:
        """What the model answers. Cancelling this ends the request.

        Raises:
            PromptTooLong: the messages are too many for the model's context.
            EndpointError: the deadline passed, or the sampler does not answer.
            RelaxGymError: the model or the sampler cannot be loaded.
        """
        return await asyncio.wrap_future(self._submit(self._complete(messages, seed)))

    def close(self) -> None:
        """Free the model. Blocks; idempotent; the next question loads it again."""
        with self._lock:
            running, self._running = self._running, None
            served, self._served = self._served, None
        if running is None:
            return
        loop, thread = running
        try:
            asyncio.run_coroutine_threadsafe(_ended(served), loop).result()
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()

    def _submit(self, work: Coroutine[Any, Any, T]) -> Any:
        with self._lock:
            if self._running is None:
                loop = asyncio.new_event_loop()
                self._running = loop, threading.Thread(target=_run, args=[loop], name="own-model", daemon=True)
                self._running[1].start()
            return asyncio.run_coroutine_threadsafe(work, self._running[0])

    async def _ready(self) -> _Served:
        if self._served is None:
            self._served = asyncio.ensure_future(_serve(self._config, self._most))
        return await asyncio.shield(self._served)  # many wait for it, and any may be cancelled

    async def _complete(self, messages: Sequence[Message], seed: int | None) -> Reply:
        served = await self._ready()
        try:
            async with asyncio.timeout(self._deadline) as clock, served.places:
                return await self._answer(served, messages, seed)
        except SamplerError as error:
            raise EndpointError(f"{self._config.model.name}: {error}") from error
        except TimeoutError as error:
            if not clock.expired():
                raise
            raise EndpointError(
                f"{self._config.model.name} took longer than {self._deadline:g} s (deadline)"
            ) from error

    async def _answer(self, served: _Served, messages: Sequence[Message], seed: int | None) -> Reply:
        conversation = served.renderer.conversation()
        conversation.observe(messages)
        prompt, most = len(conversation.token_ids), served.sampler.max_context
        if prompt >= most:
            raise PromptTooLong(f"{self._config.model.name} takes {most} tokens, and the messages are {prompt}")
        new = min(self._params.max_new_tokens, most - prompt)
        session = served.sampler.open_session()
        try:
            params = dataclasses.replace(
                self._params,
                max_new_tokens=new,
                seed=seed,
                stop_token_ids=served.renderer.stop_token_ids,
                logit_bias=served.renderer.never_sampled,
            )
            completion = await session.generate(conversation.token_ids, params)
        finally:
            session.close()
        if completion.finish_reason is FinishReason.ABORT:
            raise EndpointError(f"{self._config.model.name}: the sampler gave the answer up")
        text = served.renderer.decode(completion.token_ids)
        return Reply(
            content=served.renderer.action(text, params.stop, opened=conversation.opened_thinking),
            reasoning="",
            calls=(),
            finish_reason=completion.finish_reason,
            usage=Usage(prompt=prompt, completion=len(completion.token_ids)),
        )


async def _serve(config: RunConfig, most: int) -> _Served:
    from transformers.utils import logging as transformers_logging

    from relax_gym.build import build_component, build_renderer
    from relax_gym.context import RunContext
    from relax_gym.models import resolve_model

    transformers_logging.disable_progress_bar()  # it would tear the display apart
    path = resolve_model(config.model)
    renderer = build_renderer(config, path)
    folder = Path(tempfile.mkdtemp(prefix="relax-gym-model-"))
    context = RunContext(
        config=config, run_dir=folder, model_path=path, tokenizer=renderer.tokenizer, processor=renderer.processor
    )
    sampler: Sampler = build_component("sampler", config.sampler, context)
    try:
        await sampler.start()
    except BaseException:  # the folder has the logs of servers, and stays for those who look into it
        await sampler.aclose()
        raise
    return _Served(sampler=sampler, renderer=renderer, folder=folder, places=asyncio.Semaphore(most))


async def _ended(served: asyncio.Task[_Served] | None) -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:  # nobody is left waiting
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    if served is None or served.cancelled() or served.exception() is not None:
        return
    await served.result().sampler.aclose()
    shutil.rmtree(served.result().folder, ignore_errors=True)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        loop.close()
