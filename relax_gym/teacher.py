"""The teacher contract of on-policy distillation: sampled tokens in, what a stronger model thinks of them out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from relax_gym.errors import TrainingError
from relax_gym.types import TrainingSample

if TYPE_CHECKING:
    from relax_gym.config import TeacherSection

Form = Literal["reverse", "forward", "jsd"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Distillation:
    """What an algorithm asks of learners: to draw the policy towards teachers. See `Algorithm.distillation`.

    `teachers` maps env id to the name of a model, `teacher` is that of the envs that are not in it. `level` "loss": add
    `weight` times the divergence of `form` over the vocabulary, or over the teacher's `top_k` tokens and the rest as
    one, to the loss. "reward": subtract `weight` times (ℓ_roll − log q) of the sampled token from its advantage.
    `engine` is what the teachers run in, the option `teacher_engine` of the algorithm; None: the learner's process.
    """

    teacher: str | None
    teachers: Mapping[str, str]
    form: Form
    jsd_alpha: float
    top_k: int
    level: Literal["loss", "reward"]
    weight: float
    engine: TeacherSection | None = None

    @property
    def names(self) -> list[str]:
        """Names of all teachers, each once."""
        return sorted({*self.teachers.values(), *([] if self.teacher is None else [self.teacher])})

    def teacher_of(self, env_id: str) -> str:
        """Name of the model that teaches an env. Raises TrainingError when there is none."""
        name = self.teachers.get(env_id, self.teacher)
        if name is None:
            raise TrainingError(f"env {env_id!r} has no teacher; there is one for {', '.join(self.teachers)}")
        return name


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TeacherScores:
    """A teacher's log-probs at the n trained tokens of one sample, in their order.

    `logprobs` [n] are those of the sampled tokens; `top_ids` and `top_logprobs` [n, K] the teacher's most likely tokens
    there, most likely first, and None when none were asked for.
    """

    logprobs: NDArray[np.float32]
    top_ids: NDArray[np.int64] | None = None
    top_logprobs: NDArray[np.float32] | None = None


class Teacher(ABC):
    """A frozen model that scores what the policy sampled: in the learner's process, or an engine somewhere else."""

    scores_alone: bool = False
    """What it says of a sample depends on nothing else it is asked for: it is asked for many groups in one call."""

    @abstractmethod
    def score(self, samples: Sequence[TrainingSample], *, temperature: float, top_k: int) -> list[TeacherScores]:
        """Scores of each sample, in order; blocks.

        Read `token_ids` [T] and `loss_mask` [T]: the trained token at t is scored given the ids before t. All log-probs
        are those of the teacher's full distribution at `temperature`, which is the policy's. `top_k` 0: no top tokens.
        """

    def close(self) -> None:  # noqa: B027 (most teachers have nothing to free)
        """Free devices and processes. Idempotent."""


def checked_scores(
    teacher: Teacher, samples: Sequence[TrainingSample], *, temperature: float, top_k: int
) -> list[TeacherScores]:
    """`teacher.score`, and a complete answer.

    Raises:
        TrainingError: a score is missing or not finite; training on without it would be silent.
    """
    scores = teacher.score(samples, temperature=temperature, top_k=top_k)
    if len(scores) != len(samples):
        raise TrainingError(f"the teacher scored {len(scores)} of {len(samples)} samples; it must score each")
    for sample, score in zip(samples, scores, strict=True):
        _check(sample, score, top_k)
    return scores


def _check(sample: TrainingSample, score: TeacherScores, top_k: int) -> None:
    n = sample.trained_tokens
    expected = {"logprobs": (n,)} | ({"top_ids": (n, top_k), "top_logprobs": (n, top_k)} if top_k else {})
    for name, shape in expected.items():
        values = getattr(score, name)
        got = None if values is None else np.shape(values)
        if got != shape:
            raise TrainingError(
                f"the teacher gave {name} of shape {got} for sample {sample.episode_id!r} (segment {sample.segment}); "
                f"it must be {shape}: one row for each trained token"
            )
        if name != "top_ids" and not np.isfinite(values).all():
            raise TrainingError(
                f"the teacher gave non-finite {name} for sample {sample.episode_id!r} (segment {sample.segment}): its "
                "model is broken, or masks tokens that the policy can sample"
            )
