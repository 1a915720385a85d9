"""A teacher engine on this machine: a frozen model in a process of its own, which the learner's never holds."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from relax_gym.config import ModelConfig
from relax_gym.context import RunContext
from relax_gym.errors import ModelError, TrainingError, reason
from relax_gym.models import load_tokenizer, resolve_model
from relax_gym.teacher import Teacher, TeacherScores
from relax_gym.types import TrainingSample
from relax_gym_trainers.torch_learner.model import choose_device, choose_dtype
from relax_gym_trainers.torch_learner.options import LocalTeacherOptions
from relax_gym_trainers.torch_learner.teacher import FrozenTeacher, TeacherSettings, load_teacher, vocabulary_rows

GRACE = 10.0
"""Seconds within which a process that the kernel has ended is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What the process loads. The tokenizer and the vocabulary of `student` are those the teacher must have."""

    folder: Path
    student: Path
    settings: TeacherSettings
    threads: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """What the process answers when it raised."""

    reason: str
    traceback: str


class LocalTeacher(Teacher):
    """A `FrozenTeacher` in a spawned process that ends with `close`, with this object or with this process.

    A script that trains with it needs `if __name__ == "__main__":`, as for any spawned process.
    """

    def __init__(self, context: RunContext, options: LocalTeacherOptions, model: str) -> None:
        """Start the process and wait until it has loaded the model of this name.

        Raises:
            ConfigError: there is no such device.
            ModelError: the model cannot be found or loaded, or does not fit the policy's.
        """
        config = context.config
        trust = config.model.trust_remote_code
        device = choose_device(options.device, key="teacher_engine.device")
        settings = TeacherSettings(
            temperature=config.rollout.temperature,
            device=device,
            dtype=choose_dtype(options.dtype, device),
            chunk=options.logprob_chunk,
            budget=options.micro_batch_tokens,
            share_prefix=options.share_prefix,
            trust_remote_code=trust,
            media=config.media,
            never_sampled=context.never_sampled,
        )
        plan = _Plan(
            folder=resolve_model(ModelConfig(name=model, trust_remote_code=trust)),
            student=context.model_path,
            settings=settings,
            threads=options.threads or config.threads,
        )
        self._model, self._timeout = model, options.timeout
        spawn = multiprocessing.get_context("spawn")
        self._connection, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs, plan), name=f"teacher {model}", daemon=True)
        self._process.start()
        theirs.close()  # so that the process's is the only one, and its end the end of the connection
        self._end = weakref.finalize(self, _end, self._process, self._connection)
        try:
            self._answer()
        except TrainingError as error:
            self.close()
            raise ModelError(f"cannot start {error}") from error

    def score(self, samples: Sequence[TrainingSample], *, temperature: float, top_k: int) -> list[TeacherScores]:
        """See `Teacher.score`. Raises TrainingError when the process fails, has ended or takes too long."""
        sent = [dataclasses.replace(sample, routed_experts=None) for sample in samples]  # large, and the policy's only
        scores: list[TeacherScores] = self._answer((sent, temperature, top_k))
        return scores

    def close(self) -> None:
        """End the process. Idempotent."""
        self._end()

    def _answer(self, request: tuple[list[TrainingSample], float, int] | None = None) -> Any:
        """What the process says to a request, or by itself once it has loaded. It is ended when that takes too long."""
        if not self._end.alive:
            raise TrainingError(f"teacher {self._model!r} is closed; nothing can be scored any more")
        started = time.monotonic()
        watchdog = threading.Timer(self._timeout, self._process.kill)  # then neither side can block for ever
        watchdog.daemon = True
        watchdog.start()
        try:
            if request is not None:
                self._connection.send(request)
            answer = self._connection.recv()
        except (EOFError, OSError) as error:
            raise TrainingError(self._obituary(time.monotonic() - started)) from error
        finally:
            watchdog.cancel()
        if isinstance(answer, _Failure):
            failure = TrainingError(f"teacher {self._model!r}: {answer.reason}")
            failure.add_note(f"In the teacher's process:\n{answer.traceback}")
            raise failure
        return answer

    def _obituary(self, seconds: float) -> str:
        if seconds >= self._timeout:
            return (
                f"teacher {self._model!r}: no answer within {self._timeout:g} s, so its process was ended; give a "
                "larger teacher_engine.timeout or smaller batches"
            )
        self._process.join(GRACE)
        return (
            f"teacher {self._model!r}: its process has ended with exit code {self._process.exitcode}; its output above "
            "may say why (-9 is often the machine running out of memory)"
        )


def _end(process: BaseProcess, connection: Connection[Any, Any]) -> None:
    """The process has nothing to save, and may be in the middle of a forward pass."""
    process.kill()
    process.join(GRACE)
    connection.close()


def _serve(connection: Connection[Any, Any], plan: _Plan) -> None:
    """The process: load, say so, and score until nobody asks any more."""
    os.setsid()  # Ctrl-C reaches a whole terminal, torchrun's SIGTERM a whole group: the learner's process sees to it
    threading.Thread(target=_die_with_parent, daemon=True).start()
    teacher = _attempt(_load, plan)
    with contextlib.suppress(EOFError, OSError):
        if isinstance(teacher, _Failure):
            connection.send(teacher)
            return
        connection.send(None)
        while True:
            samples, temperature, top_k = connection.recv()
            connection.send(_attempt(teacher.score, samples, temperature=temperature, top_k=top_k))


def _load(plan: _Plan) -> FrozenTeacher:
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.disable_progress_bar()  # it would tear the display apart
    if plan.threads is not None:
        torch.set_num_threads(plan.threads)
    trust = plan.settings.trust_remote_code
    return load_teacher(
        plan.folder,
        tokenizer=load_tokenizer(plan.student, trust_remote_code=trust),
        rows=vocabulary_rows(AutoConfig.from_pretrained(plan.student, trust_remote_code=trust)),
        settings=plan.settings,
    )


def _attempt(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What the function returns, or a `_Failure`."""
    try:
        return function(*args, **kwargs)
    except Exception as error:  # whatever it is, the learner's process is who must know
        return _Failure(reason=reason(error), traceback=traceback.format_exc())


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
