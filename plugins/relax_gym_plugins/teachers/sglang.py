"""The teacher engine `sglang`: a frozen model behind SGLang servers, spoken to by the sampler's own client."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
import threading
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from transformers import AutoConfig

from relax_gym.config import ModelConfig
from relax_gym.context import RunContext
from relax_gym.errors import ConfigError, ModelError, RelaxGymError, SamplerError, TrainingError, first_cause
from relax_gym.models import resolve_model
from relax_gym.teacher import Teacher, TeacherScores
from relax_gym.types import TrainingSample
from relax_gym_plugins.samplers.sglang.engine import EngineError
from relax_gym_plugins.samplers.sglang.fleet import Fleet, Member
from relax_gym_plugins.samplers.sglang.protocol import BadReply
from relax_gym_plugins.samplers.sglang.servers import attach, launch
from relax_gym_plugins.teachers.options import SGLangTeacherOptions
from relax_gym_plugins.teachers.scores import nothing_to_score, read_scores, score_body

T = TypeVar("T")
log = logging.getLogger("relax_gym")
PROBE = "Every teacher reads the same ids: naïve café, 12,345.67 = π·r² – 你好, привет!\n\tdef f(x): return [x]"


class SGLangTeacher(Teacher):
    """Scores sequences on SGLang servers, in an event loop of its own thread: learners block, servers do not wait."""

    def __init__(self, context: RunContext, options: SGLangTeacherOptions, model: str) -> None:
        """Launch the servers of the model, or connect to those that run it.

        Raises:
            ConfigError: an option is wrong.
            ModelError: a server cannot be started or reached, or has another tokenizer than the policy.
        """
        if context.processor is not None:
            raise ConfigError(
                "teacher_engine 'sglang' scores text only, and the model reads media; take teacher_engine = \"local\""
            )
        self._model, self._options, self._context = model, options, context
        trust = context.config.model.trust_remote_code
        settings = AutoConfig.from_pretrained(context.model_path, trust_remote_code=trust)
        self._vocabulary = int(settings.get_text_config().vocab_size)
        self._fleet = Fleet(self._revive)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"teacher {model}", daemon=True)
        self._thread.start()
        try:
            with _named_as_ours():
                self._run(self._start())
        except BaseException as error:
            self.close()
            if isinstance(error, SamplerError):
                raise ModelError(f"cannot start teacher {model!r}: {error}") from error
            raise

    scores_alone = True  # each sample is a request

    def score(self, samples: Sequence[TrainingSample], *, temperature: float, top_k: int) -> list[TeacherScores]:
        """See `Teacher.score`. Raises TrainingError when no server answers, or one refuses."""
        if temperature != 1.0:
            raise TrainingError(f"teacher {self._model!r} scores at temperature 1 only, not at {temperature:g}")
        if not self._thread.is_alive():
            raise TrainingError(f"teacher {self._model!r} is closed; nothing can be scored any more")
        try:
            return self._run(self._score_all(samples, top_k))
        except (SamplerError, ExceptionGroup) as error:
            cause = first_cause(error)
            if not isinstance(cause, SamplerError):
                raise
            raise TrainingError(f"teacher {self._model!r}: {cause}") from cause

    def close(self) -> None:
        """End what was launched. Idempotent."""
        if not self._thread.is_alive():
            return
        try:
            self._run(self._fleet.aclose())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # an interrupt: what runs must not go on
            raise

    async def _start(self) -> None:
        options = self._options.servers(self._model)
        for number, url in enumerate(options.urls or [None] * options.engines):
            if url:
                self._fleet.members.append(attach(url, options))
            else:
                devices = options.devices[number] if options.devices else None
                self._fleet.members.append(launch(number, options, self._of_teacher(), devices=devices))
        connections = [asyncio.ensure_future(self._revive(member)) for member in self._fleet.members]
        try:
            await asyncio.gather(*connections)
        finally:
            for connection in connections:
                connection.cancel()
            await asyncio.gather(*connections, return_exceptions=True)

    def _of_teacher(self) -> RunContext:
        """The run as the launch code should see it: the teacher's model, and a folder of its own for logs."""
        trust = self._context.config.model.trust_remote_code
        folder = self._context.run_dir / "teachers" / re.sub(r"[^\w.-]+", "-", self._model).strip("-.")
        path = resolve_model(ModelConfig(name=self._model, trust_remote_code=trust))
        return dataclasses.replace(self._context, model_path=path, run_dir=folder)

    async def _revive(self, member: Member) -> None:
        await member.connect()
        await self._check_tokenizer(member)
        await self._fleet.serve(member)

    async def _check_tokenizer(self, member: Member) -> None:
        """Servers give no vocabulary, but say how they read a text (SGLang since `/tokenize`)."""
        try:
            reply = await member.engine.post("/tokenize", {"prompt": PROBE, "add_special_tokens": False})
        except EngineError as error:
            if error.status != 404:
                raise
            log.warning("%s cannot say how it reads text: give it a teacher with the model's tokenizer", member.engine)
            return
        theirs, ours = reply.get("tokens"), self._context.tokenizer.encode(PROBE, add_special_tokens=False)
        if theirs != ours:
            raise ModelError(
                f"teacher {self._model!r} on {member.engine} has another tokenizer than the model: it reads a text as "
                f"{str(theirs)[:80]}…, the model as {str(ours)[:80]}…; a teacher scores the policy's token ids, so it "
                "must come from a family with the same vocabulary"
            )

    async def _score_all(self, samples: Sequence[TrainingSample], top_k: int) -> list[TeacherScores]:
        turns = asyncio.Semaphore(self._options.concurrency)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._score(sample, top_k, turns)) for sample in samples]
        return [task.result() for task in tasks]

    async def _score(self, sample: TrainingSample, top_k: int, turns: asyncio.Semaphore) -> TeacherScores:
        if not sample.trained_tokens:
            return nothing_to_score(top_k)
        body, failed = score_body(sample, top_k), None
        async with turns:
            for left in range(self._options.retries, -1, -1):
                async with self._fleet.lease(None, avoid=failed) as member:
                    try:
                        reply = await member.engine.generate(body, timeout=self._options.request_timeout)
                        return read_scores(reply, sample, top_k, self._vocabulary)
                    except (EngineError, BadReply) as error:
                        failed = member
                        if not left or (isinstance(error, EngineError) and error.refused):
                            raise SamplerError(f"sample {sample.episode_id!r}, {member.engine}: {error}") from error
                        log.warning("teacher %r: %s; trying again", self._model, error)
                        if isinstance(error, EngineError) and error.status is None:
                            await self._fleet.quarantine(member, error)  # connected again, and launched again, first
        raise AssertionError("unreachable: the last try returns or raises")


@contextmanager
def _named_as_ours() -> Iterator[None]:
    """Options of servers are the sampler's; in messages they are this engine's."""
    try:
        yield
    except RelaxGymError as error:
        if "sampler." not in str(error):
            raise
        raise type(error)(str(error).replace("sampler.", "teacher_engine.")) from error
