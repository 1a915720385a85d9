"""The teachers of a run, and what the torch learner asks of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from relax_gym.algorithm import FloatArray
from relax_gym.build import build_component
from relax_gym.config import ModelConfig, load_algorithms
from relax_gym.context import RunContext
from relax_gym.errors import ConfigError
from relax_gym.models import resolve_model
from relax_gym.teacher import Distillation, Teacher, checked_scores
from relax_gym.trajectory import with_advantage
from relax_gym.types import TrainingSample
from relax_gym_trainers.device import upload
from relax_gym_trainers.functional import append_tail, distilled_advantages, divergence
from relax_gym_trainers.torch_learner.divergence import FullVocabulary, Target, TopTokens, compare_all
from relax_gym_trainers.torch_learner.options import TorchLearnerOptions
from relax_gym_trainers.torch_learner.packing import MicroBatch
from relax_gym_trainers.torch_learner.policy import Policy
from relax_gym_trainers.torch_learner.teacher import FrozenTeacher, TeacherSettings, load_teacher, vocabulary_rows


class Distiller:
    """The teachers of one algorithm: one for each env, or one for all."""

    whole: tuple[type[Teacher], ...] = (FrozenTeacher,)
    """Teachers whose logits over the whole vocabulary are here."""

    def __init__(self, distillation: Distillation, teachers: Mapping[str, Teacher], *, temperature: float) -> None:
        """`teachers` are by model name; `temperature` is the policy's.

        Raises:
            ConfigError: whole vocabularies are to be compared, and a teacher's logits are not here.
        """
        self.weight = distillation.weight
        self.as_loss = distillation.level == "loss"
        self._distillation = distillation
        self._teachers = teachers
        self._temperature = temperature
        self._form = partial(divergence, form=distillation.form, alpha=distillation.jsd_alpha)
        here = all(isinstance(teacher, self.whole) for teacher in teachers.values())
        if self.as_loss and not distillation.top_k and not here:
            raise ConfigError(
                "algorithm.top_k = 0 compares whole vocabularies, for which a teacher must be a model in the learner's "
                "process; give a top_k, or level = 'reward'"
            )

    @property
    def share_prefix(self) -> bool:
        """Whether every teacher in the process takes micro-batches whose rows share a prompt."""
        frozen = [teacher for teacher in self._teachers.values() if isinstance(teacher, FrozenTeacher)]
        return all(teacher.policy.share_prefix for teacher in frozen)

    def owner(self, sample: TrainingSample) -> str:
        """Name of the sample's teacher. Samples of two must not share a micro-batch."""
        return self._distillation.teacher_of(sample.env_id)

    def sampled(self, groups: Sequence[Sequence[TrainingSample]]) -> list[list[FloatArray]]:
        """The teachers' log-probs of the trained tokens of each group's samples, [trained_tokens] each."""
        found: dict[TrainingSample, FloatArray] = {}
        for name in dict.fromkeys(self.owner(sample) for group in groups for sample in group):
            teacher = self._teachers[name]
            own = [[sample for sample in group if self.owner(sample) == name] for group in groups]
            for samples in [list(chain(*own))] if teacher.scores_alone else filter(None, own):
                scores = checked_scores(teacher, samples, temperature=self._temperature, top_k=0)
                found |= {s: score.logprobs.astype(np.float64) for s, score in zip(samples, scores, strict=True)}
        return [[found[sample] for sample in group] for group in groups]

    def score(self, policy: Policy, batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Log-prob and entropy under the policy, its divergence from the teacher, the teacher's log-prob; [N] each.

        The last is a constant.
        """
        target = self._target(batch, policy.device)
        features = policy.features(batch)
        targets = upload(batch.targets, policy.device)
        logprobs, entropy = policy.read(features, targets, keep=False)  # two chunks' logits follow
        return logprobs, entropy, *compare_all(policy, features, target)

    def _target(self, batch: MicroBatch, device: torch.device) -> Target:
        """What a micro-batch's teacher says about its trained tokens."""
        teacher = self._teachers[self.owner(batch.members[0])]
        top_k = self._distillation.top_k
        if not top_k:
            assert isinstance(teacher, FrozenTeacher)
            targets = upload(batch.targets, device)
            features = teacher.features(batch)
            return FullVocabulary(teacher=teacher.policy, features=features, targets=targets, form=self._form)
        scores = checked_scores(teacher, batch.members, temperature=self._temperature, top_k=top_k)

        def join(name: str) -> Tensor:
            return upload(np.concatenate([getattr(score, name) for score in scores]), device)

        top = append_tail(join("top_logprobs"))
        return TopTokens(ids=join("top_ids"), top=top, logprobs=join("logprobs"), form=self._form)

    def close(self) -> None:
        """Close the teachers."""
        for teacher in self._teachers.values():
            teacher.close()


def load_distiller(
    distillation: Distillation | None, context: RunContext, options: TorchLearnerOptions, student: Policy
) -> Distiller | None:
    """The distiller of an algorithm with its teachers loaded, each once; None without distillation.

    Teachers are built by the engine that the algorithm names; without one they are on the student's device, in the
    precision of its arithmetic.

    Raises:
        ModelError: a teacher cannot be found, or does not fit the model.
        ConfigError: `top_k` is more than there is.
    """
    if distillation is None:
        return None
    rows = vocabulary_rows(student.model.config)
    check_top(distillation, rows)
    trust = context.config.model.trust_remote_code
    settings = TeacherSettings(
        temperature=student.temperature,
        device=student.device,
        dtype=student.dtype,
        chunk=options.logprob_chunk,
        budget=options.micro_batch_tokens,
        share_prefix=options.share_prefix,
        trust_remote_code=trust,
        media=context.config.media,
        never_sampled=context.never_sampled,
    )

    def load(name: str) -> Teacher:
        if distillation.engine is not None:
            teacher: Teacher = build_component("teacher", distillation.engine, context, name)
            return teacher
        folder = resolve_model(ModelConfig(name=name, trust_remote_code=trust))
        return load_teacher(folder, tokenizer=context.tokenizer, rows=rows, settings=settings)

    teachers = {name: load(name) for name in distillation.names}
    return Distiller(distillation, teachers, temperature=student.temperature)


def check_teachers(context: RunContext, rows: int, check: Callable[[Path], object]) -> None:
    """Raise what a learner's `load_distiller` would of the run's teachers, whose weights are not read.

    `rows` is the number of ids that the model has logits for. `check` raises where the model of a folder is no teacher;
    what an engine runs is the engine's to check, when it starts.
    """
    trust = context.config.model.trust_remote_code
    asked = [algorithm.distillation for algorithm in load_algorithms(context.config) if algorithm.distillation]
    for distillation in asked:
        check_top(distillation, rows)
    for name in sorted({name for one in asked if one.engine is None for name in one.names}):
        check(resolve_model(ModelConfig(name=name, trust_remote_code=trust)))


def check_top(distillation: Distillation, rows: int) -> None:
    """Raises ConfigError where more tokens are to be compared than the vocabulary has."""
    if distillation.top_k > rows:
        raise ConfigError(
            f"algorithm.top_k = {distillation.top_k} is more than the {rows} tokens of the vocabulary; give fewer, or "
            "0 to compare all"
        )


def distill_advantages(
    samples: Sequence[TrainingSample], scores: Sequence[FloatArray], *, weight: float
) -> list[TrainingSample]:
    """The samples with the teachers' reward in their advantages; `scores` are `Distiller.sampled`."""
    out = []
    for sample, score in zip(samples, scores, strict=True):
        on = sample.loss_mask == 1
        own, rollout = (values[on].astype(np.float64) for values in (sample.advantages, sample.logprobs))
        out.append(with_advantage(sample, distilled_advantages(own, rollout, score, weight=weight)))
    return out
