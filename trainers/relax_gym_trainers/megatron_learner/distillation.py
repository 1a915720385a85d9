"""The teachers of a run on ranks: laid out as the policy, or engines that rank 0 asks for all."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from transformers import PretrainedConfig

from relax_gym.build import build_component
from relax_gym.config import ModelConfig
from relax_gym.context import RunContext
from relax_gym.errors import ConfigError, ModelError, TrainingError, reason
from relax_gym.models import language_config, load_tokenizer, resolve_model
from relax_gym.processing import MediaProcessor
from relax_gym.teacher import Distillation, Teacher, TeacherScores, checked_scores
from relax_gym.types import TrainingSample
from relax_gym_trainers.functional import append_tail
from relax_gym_trainers.megatron_learner import batches, hf, model
from relax_gym_trainers.megatron_learner.backend import Look, MegatronBackend, RankPart
from relax_gym_trainers.megatron_learner.batches import ContextShare, PackedBatch, Plan
from relax_gym_trainers.megatron_learner.divergence import SharedTop, SharedVocabulary, shared_top
from relax_gym_trainers.megatron_learner.families.base import number_of_experts
from relax_gym_trainers.megatron_learner.parallel import Layout
from relax_gym_trainers.megatron_learner.towers import MediaReader, text_config
from relax_gym_trainers.reference import on_host, settle
from relax_gym_trainers.torch_learner.distillation import Distiller, check_top
from relax_gym_trainers.torch_learner.divergence import Form, Target
from relax_gym_trainers.torch_learner.logprobs import Head
from relax_gym_trainers.torch_learner.model import load_settings
from relax_gym_trainers.torch_learner.teacher import check_tokenizer, surplus_rows

from megatron.core import parallel_state  # isort: skip

T = TypeVar("T")
Top = tuple[Tensor, Tensor, Tensor]
"""Of some tokens the log-prob [n], and ids and log-probs of the likeliest ones [n, K] each."""


class RankTeacher(Teacher):
    """A frozen model laid out as the policy: each rank has the same ids of its vocabulary as of the policy's.

    Every method is called on all ranks at the same time. With `learner.offload_reference` the weights are in host
    memory between their passes, and so is what these give.
    """

    def __init__(self, backend: MegatronBackend) -> None:
        """`backend` computes with the teacher's chunks."""
        self.backend = backend
        self._offload = backend.options.offload_reference
        if self._offload:
            backend.reference.take()
            backend.reference.stay_out()

    def score(self, samples: Sequence[TrainingSample], *, temperature: float, top_k: int) -> list[TeacherScores]:
        """See `Teacher.score`; on every rank. Raises ModelError at another temperature than the policy's, and where a
        sample has media that it cannot read."""
        own = self.backend.head.temperature
        if temperature != own:
            raise ModelError(f"this teacher scores at temperature {own}, not at {temperature}")
        self.check_media(samples)
        part = self.backend.plan(samples, skip_flat=False)
        found: dict[TrainingSample, TeacherScores] = {}
        for batch, top in zip(part.micro_batches, self._tops(part.micro_batches, top_k), strict=True):
            if top is not None:
                share = self.backend.share_of(batch)
                whole = (self.backend.over_context(values, batch, share).cpu().numpy() for values in top)
                ends = np.cumsum(batch.token_counts)[:-1]
                rows = zip(*(np.split(values, ends) for values in whole), strict=True)
                found |= {member: _scores(*row) for member, row in zip(batch.members, rows, strict=False)}
        scores = self.backend.exchange(found, samples)
        nothing = np.zeros((0, top_k), dtype=np.float32)
        return [scores.get(s) or _scores(nothing.sum(1), nothing.astype(np.int64), nothing) for s in samples]

    def targets(self, mine: Sequence[PackedBatch], count: int, *, top_k: int, form: Form) -> list[Target | None]:
        """What it says about this rank's micro-batches `mine`, of which some rank has `count`; None but on the last
        stage."""
        group = parallel_state.get_tensor_model_parallel_group()
        layout = self.backend.layout
        count += -count % layout.pp if layout.vpp > 1 else 0
        padded = [*mine, *[batches.empty(layout.token_multiple)] * (count - len(mine))]
        if top_k:
            tops = self._tops(padded, top_k)
            return [None if top is None else _shared_top(top, form) for top in tops[: len(mine)]]

        def look(hidden: Tensor, batch: PackedBatch, share: ContextShare) -> tuple[Tensor, Tensor]:
            features, targets = self.backend.predicted(hidden, batch, share)
            return (on_host(features) if self._offload else features), targets

        found, head = self._read(padded, look)
        settle([self.backend.device] if self._offload else [])
        options = {"head": head, "dtype": self.backend.head.dtype, "group": group, "form": form}
        return [
            None if said is None else SharedVocabulary(features=said[0], targets=said[1], **options)
            for said in found[: len(mine)]
        ]

    def _tops(self, mine: Sequence[PackedBatch], top_k: int) -> list[Top | None]:
        options = {"group": parallel_state.get_tensor_model_parallel_group()}
        options |= {"chunk": self.backend.head.chunk, "dtype": self.backend.head.dtype}

        def look(hidden: Tensor, batch: PackedBatch, share: ContextShare) -> Top:
            features, targets = self.backend.predicted(hidden, batch, share)
            return shared_top(features, targets, self.backend.rows_of_head(), top_k, **options)

        return self._read(mine, look)[0]

    def _read(self, mine: Sequence[PackedBatch], look: Look[T]) -> tuple[list[T | None], Head | None]:
        """See `MegatronBackend.read`; and this rank's rows of the head, on its device, where there are some."""
        alone = [self._own(batch) for batch in mine]
        with self.backend.as_reference() if self._offload else contextlib.nullcontext():
            found, head = self.backend.read(alone, look), None
            if parallel_state.is_pipeline_last_stage():
                head = self.backend.rows_of_head()
                head = dataclasses.replace(head, weight=head.weight.detach())  # what is there now, wherever it goes
            return found, head

    def _own(self, batch: PackedBatch) -> PackedBatch:
        """Without what is the policy's only, the chosen experts, and with the positions of this model."""
        plain = np.concatenate([np.arange(length) for length in np.diff(batch.cu_seqlens)])
        return self.backend.laid_out(dataclasses.replace(batch, experts=None, positions=plain))

    def check_media(self, samples: Sequence[TrainingSample]) -> None:
        """Raises ModelError where a sample has media and the model reads text only: it would take the placeholders for
        text."""
        seen = next((sample for sample in samples if sample.media), None)
        if seen is not None and self.backend.reader is None:
            raise ModelError(
                f"sample {seen.episode_id!r} has {seen.media[0].media.kind} input, but its teacher reads text only; "
                "give the algorithm one that reads media"
            )

    def close(self) -> None:
        """Drop the weights."""
        self.backend.reference.values = []
        for chunk in self.backend.chunks:
            chunk.to("meta")


class SharedEngine(Teacher):
    """An engine that only rank 0 has and asks; every rank gets what it answers. All ranks call `score` together."""

    def __init__(self, build: Callable[[], Teacher], name: str, group: Any) -> None:
        """`build` is called on rank 0, and errors are raised on all; `group` has all ranks and takes objects."""
        self._name, self._group, self._engine = name, group, None

        def make() -> bool:
            self._engine = build()
            return self._engine.scores_alone

        self.scores_alone = self._ask(make)

    def score(self, samples: Sequence[TrainingSample], *, temperature: float, top_k: int) -> list[TeacherScores]:
        """See `Teacher.score`. Raises TrainingError where the engine fails on rank 0, and there what it raised."""
        engine = self._engine

        def ask() -> list[TeacherScores]:
            assert engine is not None
            return engine.score(samples, temperature=temperature, top_k=top_k)

        return self._ask(ask)

    def _ask(self, ask: Callable[[], T]) -> T:
        """What `ask` returns on rank 0. No rank waits for an answer that will not come."""
        answer: list[Any] = [None, None]
        error: Exception | None = None
        if dist.get_rank(self._group) == 0:
            try:
                answer[0] = ask()
            except Exception as raised:
                error, answer[1] = raised, reason(raised)
        dist.broadcast_object_list(answer, src=0, group=self._group)
        if error is not None:
            raise error
        if answer[1] is not None:
            raise TrainingError(f"the engine of teacher {self._name!r} failed on rank 0: {answer[1]}")
        value: T = answer[0]
        return value

    def close(self) -> None:
        """Close the engine, on rank 0."""
        if self._engine is not None:
            self._engine.close()


class RankDistiller(Distiller):
    """The teachers of one algorithm, each on all ranks. Its methods are called on all ranks at the same time."""

    whole = (RankTeacher,)

    def __init__(self, distillation: Distillation, teachers: Mapping[str, Teacher], student: MegatronBackend) -> None:
        """See `Distiller`; `teachers` are `RankTeacher`s or `SharedEngine`s."""
        super().__init__(distillation, teachers, temperature=student.head.temperature)
        self._student = student

    def targets(self, part: RankPart) -> list[Target | None]:
        """What teachers say about each of this rank's micro-batches; None for those without samples, and on ranks that
        are not of the last stage.

        Raises:
            TrainingError: an engine fails, or a score is missing.
        """
        found: list[Target | None] = [None] * len(part.micro_batches)
        owners = [self.owner(batch.members[0]) if batch.members else None for batch in part.micro_batches]
        for name in dict.fromkeys(self.owner(sample) for sample in part.plan.used):
            numbers = [number for number, owner in enumerate(owners) if owner == name]
            said = self._ask(name, [part.micro_batches[number] for number in numbers], part.plan)
            for number, target in zip(numbers, said, strict=True):
                found[number] = target
        return found

    def _ask(self, name: str, mine: Sequence[PackedBatch], plan: Plan) -> list[Target | None]:
        teacher, top_k = self._teachers[name], self._distillation.top_k
        samples = [sample for sample in plan.used if self.owner(sample) == name]
        if isinstance(teacher, RankTeacher):
            teacher.check_media(samples)
            shares = [[self.owner(plan.used[members[0]]) for members in share if members] for share in plan.shares]
            count = max(owners.count(name) for owners in shares)
            return teacher.targets(mine, count, top_k=top_k, form=self._form)
        scores = checked_scores(teacher, samples, temperature=self._temperature, top_k=top_k)
        if not parallel_state.is_pipeline_last_stage():
            return [None] * len(mine)
        by_sample = dict(zip(samples, scores, strict=True))
        return [self._from_engine(batch, [by_sample[member] for member in batch.members]) for batch in mine]

    def _from_engine(self, batch: PackedBatch, scores: Sequence[TeacherScores]) -> SharedTop:
        """The part of this context-parallel rank."""
        trained = self._student.share_of(batch).trained

        def join(name: str) -> Tensor:
            return torch.from_numpy(np.concatenate([getattr(score, name) for score in scores])[trained])

        top = join("logprobs"), join("top_ids"), join("top_logprobs")
        logprobs, ids, likeliest = (values.to(self._student.device) for values in top)
        return _shared_top((logprobs, ids, likeliest), self._form)


def load_distiller(
    distillation: Distillation | None, context: RunContext, student: MegatronBackend
) -> RankDistiller | None:
    """The distiller of an algorithm with its teachers loaded, each once; None without distillation.

    Teachers are built by the engine that the algorithm names, on rank 0; without one they are laid out as the student.

    Raises:
        ModelError: a teacher cannot be found, or does not fit the model.
        ConfigError: `top_k` is more than there is, or a teacher cannot be laid out so.
    """
    if distillation is None:
        return None
    engine, rows = distillation.engine, student.head.vocabulary
    check_top(distillation, rows)

    def load(name: str) -> Teacher:
        if engine is not None:
            return SharedEngine(partial(build_component, "teacher", engine, context, name), name, student.control)
        folder = resolve_model(ModelConfig(name=name, trust_remote_code=context.config.model.trust_remote_code))
        return load_teacher(folder, context, student)

    teachers = {name: load(name) for name in distillation.names}
    return RankDistiller(distillation, teachers, student)


def load_teacher(folder: Path, context: RunContext, student: MegatronBackend) -> RankTeacher:
    """The model of a folder, laid out as the student and in the precision of its arithmetic.

    Raises:
        ModelError: it cannot be loaded, or speaks another vocabulary than the student.
        ConfigError: it cannot be laid out so.
    """
    trust, rows = context.config.model.trust_remote_code, student.head.vocabulary
    surplus = check_teacher(folder, context, student.layout, rows)
    processor = MediaProcessor.load(folder, context.config.media, trust_remote_code=trust)
    whole = language_config(folder)
    config = text_config(whole)
    config.vocab_size = rows  # so that every rank has the same ids of both
    layout = _layout_of(config, student.layout)
    with _laid_out(folder):
        chunks = model.build(config, layout, student.head.dtype, whole=whole, calculate_per_token_loss=True)
        hf.load(chunks, folder, config, surplus=surplus)
    for chunk in chunks:
        chunk.requires_grad_(False)
    reader = None if processor is None else MediaReader(processor, whole)
    return RankTeacher(MegatronBackend(chunks, layout, student.options, student.head, reader))


def check_teacher(folder: Path, context: RunContext, layout: Layout, rows: int) -> int:
    """How many ids it has logits for beyond the student's `rows`; see `surplus_rows`.

    Raises:
        ModelError, ConfigError: `load_teacher` would not take the model, whose weights are not read.
    """
    trust = context.config.model.trust_remote_code
    check_tokenizer(folder, context.tokenizer, load_tokenizer(folder, trust_remote_code=trust))
    whole = load_settings(folder, trust_remote_code=False)
    config = text_config(whole)
    surplus = surplus_rows(folder, config, rows=rows, used=len(context.tokenizer))
    with _laid_out(folder):
        model.check_code(whole, trusted=trust)
        model.check_layout(config, whole, _layout_of(config, layout))
        hf.known_tensors(folder, config)
    return surplus


def _layout_of(config: PretrainedConfig, layout: Layout) -> Layout:
    """The student's; without experts the ranks of a stage share none."""
    return layout if number_of_experts(config) else dataclasses.replace(layout, ep=1, etp=None)


@contextlib.contextmanager
def _laid_out(folder: Path) -> Iterator[None]:
    try:
        yield
    except (ConfigError, ModelError) as error:
        raise type(error)(
            f"teacher {folder} cannot be laid out over the learner's ranks as its policy: {error}; a teacher_engine "
            "runs it elsewhere"
        ) from error


def _shared_top(top: Top, form: Form) -> SharedTop:
    logprobs, ids, likeliest = top
    group = parallel_state.get_tensor_model_parallel_group()
    return SharedTop(ids=ids, top=append_tail(likeliest), logprobs=logprobs, group=group, form=form)


def _scores(logprobs: NDArray[Any], ids: NDArray[Any], top: NDArray[Any]) -> TeacherScores:
    if not top.shape[1]:
        return TeacherScores(logprobs=logprobs)
    return TeacherScores(logprobs=logprobs, top_ids=ids, top_logprobs=top)
