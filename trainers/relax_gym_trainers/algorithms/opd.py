"""On-policy distillation: the policy samples, a teacher says how likely it would have said that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from relax_gym.algorithm import FloatArray
from relax_gym.config import TeacherSection, load_algorithms
from relax_gym.errors import ConfigError, suggestion
from relax_gym.teacher import Distillation, Form
from relax_gym_trainers.algorithms.grpo import GRPO

if TYPE_CHECKING:
    from relax_gym.config import RunConfig


class OPD(GRPO):
    """On-policy distillation (GKD: Agarwal et al. 2024, arXiv:2306.13649; Lu 2025, Thinking Machines Lab).

    L = rl_weight · GRPO's loss + opd_weight · D(p, q), D a divergence over the vocabulary at each trained token; or,
    with `level = "reward"`, GRPO's loss with A = rl_weight · A_GRPO − opd_weight · sg(ℓ_roll − log q). All trained
    tokens are distilled, also those of episodes that could not be scored. Mean over samples of the mean over tokens.
    """

    teacher: str | None = Field(None, min_length=1, description="the teacher of all envs: a name as in [model]")
    teachers: dict[str, str] | None = Field(None, description="or one for each: env id = model name")
    teacher_engine: TeacherSection | None = Field(None, description="runs the teachers; default: the learner's process")
    form: Form = Field("reverse", description="KL(policy‖teacher), KL(teacher‖policy), or in between")
    jsd_alpha: float = Field(0.5, ge=0, le=1, description="with form = 'jsd': 0 is reverse, 1 is forward")
    top_k: int = Field(0, ge=0, description="compare the teacher's k likeliest tokens and the rest as one; 0: all")
    level: Literal["loss", "reward"] = Field("loss", description="a loss over the vocabulary, or the sampled token's")
    opd_weight: float = Field(1.0, gt=0, description="weight of the teacher")
    rl_weight: float = Field(0.0, ge=0, description="weight of the env's reward; 0 is distillation alone")

    @model_validator(mode="after")
    def _check_distillation(self) -> Self:
        if (self.teacher is None) == (self.teachers is None):
            raise ValueError(
                "opd needs a teacher: give teacher = 'model name', or teachers = {'env id' = 'model name', …} for one "
                "in each env; not both"
            )
        if self.level == "reward" and (self.form != "reverse" or self.top_k):
            given = f"form = {self.form!r}" if self.form != "reverse" else f"top_k = {self.top_k}"
            raise ValueError(
                f"level = 'reward' compares the sampled token only, whose expectation is the reverse KL over the whole "
                f"vocabulary; it has no {given}: use level = 'loss'"
            )
        if self.teacher_engine is not None and self.level == "loss" and not self.top_k:
            raise ValueError(
                f"top_k = 0 compares whole vocabularies, for which a teacher must be a model in the learner's process; "
                f"with teacher_engine = {self.teacher_engine.name!r} give a top_k, or level = 'reward'"
            )
        if self.form != "jsd" and self.changed("jsd_alpha"):
            raise ValueError(f"jsd_alpha = {self.jsd_alpha} goes with form = 'jsd'; the form is {self.form!r}")
        return self

    def check_run(self, config: RunConfig) -> None:
        """Every env that is distilled has a teacher, and every teacher an env."""
        super().check_run(config)
        if self.teachers is None:
            return
        pairs = zip(config.env, load_algorithms(config), strict=True)
        own = sorted({env.id for env, algorithm in pairs if algorithm == self})
        for env_id in own:
            if env_id not in self.teachers:
                raise ConfigError(f"algorithm.teachers has no teacher for env {env_id!r}; it has {self.teachers}")
        for env_id in self.teachers:
            if env_id not in own:
                raise ConfigError(
                    f"algorithm.teachers names env {env_id!r}, which is not distilled{suggestion(env_id, own)}"
                )

    @property
    def is_policy_gradient(self) -> bool:
        """The divergence as a loss is exact for any state, whichever policy came there."""
        return self.level == "reward" or self.rl_weight > 0 or self.kl_reward_coef > 0

    @property
    def needs_group(self) -> bool:
        """A teacher judges each token by itself; only GRPO's part compares episodes."""
        return self.rl_weight > 0

    @property
    def distillation(self) -> Distillation:
        """The teachers' part, which learners see to."""
        return Distillation(
            teacher=self.teacher,
            teachers=self.teachers or {},
            form=self.form,
            jsd_alpha=self.jsd_alpha,
            top_k=self.top_k,
            level=self.level,
            weight=self.opd_weight,
            engine=self.teacher_engine,
        )

    def advantages(self, rewards: FloatArray) -> FloatArray:
        """rl_weight times the group-normalised rewards, [G] → [G]."""
        return self.rl_weight * super().advantages(rewards)
