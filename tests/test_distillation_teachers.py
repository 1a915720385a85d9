"""Teachers of the torch learner: engines, frozen models, and those that do not answer or do not fit."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from distillation_kit import ENV, GPT2, distilling, routed
from learner_cases import context, random_batch, sample, save_model, weights, without_seconds
from transformers import GPT2Config

from relax_gym.errors import ConfigError, ModelError, TrainingError
from relax_gym.teacher import Teacher, TeacherScores, checked_scores
from relax_gym.types import Batch
from relax_gym_trainers.torch_learner.distillation import Distiller
from relax_gym_trainers.torch_learner.scores import by_group
from relax_gym_trainers.torch_learner.teacher import FrozenTeacher

pytest_plugins = ["distillation_fixtures"]


class Engine(Teacher):
    """A teacher somewhere else: whatever `answer` makes of the right scores."""

    def __init__(self, real, answer):
        self.real, self.answer = real, answer

    def score(self, samples, *, temperature, top_k):
        return self.answer(self.real.score(samples, temperature=temperature, top_k=top_k))


def engine(trainer, answer=lambda scores: scores):
    (name,) = trainer.objectives[0].distiller._teachers
    real = trainer.objectives[0].distiller._teachers[name]
    distillation = trainer.objectives[0].algorithm.distillation
    distiller = Distiller(distillation, {name: Engine(real, answer)}, temperature=0.7)
    trainer.objectives = [dataclasses.replace(trainer.objectives[0], distiller=distiller)]
    return trainer


@pytest.mark.parametrize("algorithm", [{"top_k": 3}, {"level": "reward"}])
def test_a_teacher_may_be_an_engine(models, algorithm):
    batch = random_batch()
    here = distilling(models, double=False, **algorithm)
    there = engine(distilling(models, double=False, **algorithm))
    assert without_seconds(here.step(batch)) == without_seconds(there.step(batch))
    assert all(torch.equal(value, weights(there)[name]) for name, value in weights(here).items())


@pytest.mark.parametrize(("alone", "calls"), [(False, 2), (True, 1)])
def test_an_engine_whose_scores_stand_alone_is_asked_once_for_all_groups(models, alone, calls):
    asked = []
    there = engine(distilling(models, double=False, level="reward"), lambda scores: asked.append(len(scores)) or scores)
    (teacher,) = there.objectives[0].distiller._teachers.values()
    teacher.scores_alone = alone
    here = distilling(models, double=False, level="reward")
    batch = random_batch(groups=2, size=3)
    assert without_seconds(there.step(batch))["opd_kl"] == pytest.approx(here.step(batch)["opd_kl"], rel=1e-5)
    assert (len(asked), sum(asked)) == (calls, 6)


def test_an_engine_cannot_compare_whole_vocabularies(models):
    with pytest.raises(ConfigError, match="top_k = 0 compares whole vocabularies, for which a teacher must be a model"):
        engine(distilling(models, double=False))


@pytest.mark.parametrize("algorithm", [{"top_k": 3}, {"level": "reward"}])
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda scores: scores[1:], "the teacher scored "),
        (lambda scores: [dataclasses.replace(s, logprobs=s.logprobs[1:]) for s in scores], "gave logprobs of shape"),
        (lambda scores: [dataclasses.replace(s, logprobs=None) for s in scores], "gave logprobs of shape None"),
        (lambda scores: [dataclasses.replace(s, logprobs=s.logprobs * np.nan) for s in scores], "non-finite logprobs"),
        (lambda scores: [dataclasses.replace(s, logprobs=s.logprobs - np.inf) for s in scores], "non-finite logprobs"),
    ],
)
def test_missing_scores_are_an_error(models, algorithm, answer, message):
    trainer = engine(distilling(models, double=False, **algorithm), answer)
    before = weights(trainer)
    with pytest.raises(TrainingError, match=message):
        trainer.step(random_batch())
    assert all(torch.equal(value, before[name]) for name, value in weights(trainer).items())


@pytest.mark.parametrize("algorithm", [{"top_k": 3, "rl_weight": 0.5}, {"level": "reward"}])
def test_groups_that_are_streamed_learn_what_teachers_say_of_them(models, algorithm):
    teachers = {ENV: str(models["t1"]), "test/Other-v0": str(models["t2"])}
    plain, ahead = (
        distilling(models, double=False, teachers=teachers, options={"stream": stream, "eps": 1e-3}, **algorithm)
        for stream in (False, True)
    )
    batch = random_batch(groups=3)
    batch = dataclasses.replace(batch, samples=routed(batch.samples))
    for group in by_group(batch.samples)[1:]:
        ahead.prepare(group)
    expected, found = without_seconds(plain.step(batch)), without_seconds(ahead.step(batch))
    assert found.pop("streamed_tokens") == sum(s.trained_tokens for s in batch.samples if s.group_id != "g0")
    assert {k: v for k, v in found.items() if k != "padded_tokens"} == pytest.approx(
        {k: v for k, v in expected.items() if k != "padded_tokens"}, rel=1e-5, abs=1e-6
    )
    assert all(torch.allclose(value, weights(plain)[name], atol=1e-6) for name, value in weights(ahead).items())


def test_preparing_asks_the_teachers_before_the_step_and_changes_no_bit(models):
    plain, ahead = (distilling(models, double=False, level="reward") for _ in range(2))
    batch = random_batch()
    for group in by_group(batch.samples):
        ahead.prepare(group)
    for teacher in ahead.objectives[0].distiller._teachers.values():
        teacher.close()  # nobody asks it again
    assert without_seconds(ahead.step(batch)) == without_seconds(plain.step(batch))
    assert all(torch.equal(value, weights(ahead)[name]) for name, value in weights(plain).items())


def test_missing_top_tokens_are_an_error(models):
    bare = engine(
        distilling(models, double=False, top_k=3), lambda scores: [TeacherScores(logprobs=s.logprobs) for s in scores]
    )
    with pytest.raises(TrainingError, match=r"gave top_ids of shape None for sample .* it must be \(\d, 3\)"):
        bare.step(random_batch())


def test_a_sample_whose_env_has_no_teacher_is_an_error(models):
    trainer = distilling(models, double=False, teachers={ENV: str(models["t1"])})
    with pytest.raises(TrainingError, match="env 'test/Other-v0' has no teacher"):
        trainer.step(Batch(version=0, samples=routed(random_batch().samples)))


def test_the_frozen_teacher_keeps_the_order_and_scores_what_is_asked(models):
    trainer = distilling(models, top_k=3)
    (teacher,) = trainer.objectives[0].distiller._teachers.values()
    assert isinstance(teacher, FrozenTeacher)
    teacher._budget = 30
    samples = [*random_batch(groups=3).samples, sample([3, 4, 5], [0, 0, 0])]
    whole = checked_scores(teacher, samples, temperature=0.7, top_k=3)
    assert [len(score.logprobs) for score in whole] == [s.trained_tokens for s in samples]
    for one, score in zip(samples, whole, strict=True):
        (alone,) = checked_scores(teacher, [one], temperature=0.7, top_k=3)
        np.testing.assert_allclose(alone.logprobs, score.logprobs, rtol=1e-9)
        np.testing.assert_allclose(alone.top_logprobs, score.top_logprobs, rtol=1e-9)
        assert (alone.top_ids == score.top_ids).all()
        assert (np.diff(score.top_logprobs, axis=1) <= 0).all()
    with pytest.raises(ModelError, match=r"scores at temperature 0\.7, not at 1\.0"):
        teacher.score(samples, temperature=1.0, top_k=0)


def test_a_teacher_of_another_vocabulary_is_refused(models, tmp_path):
    other = save_model(tmp_path / "other", GPT2, 4)
    tokenizer = context(other).tokenizer
    tokenizer.add_tokens(["new"])
    tokenizer.save_pretrained(other)
    with pytest.raises(ModelError, match=r"another tokenizer than the model: 62 tokens instead of 61, 1 with .*'new'"):
        distilling(models, teacher=str(other))


def test_rows_that_pad_the_teachers_vocabulary_are_cut_and_missing_ones_refused(models, tmp_path):
    def teacher(name, **changes):
        folder = save_model(tmp_path / name, GPT2Config(**{**GPT2.to_dict(), **changes}), 1)
        context(folder).tokenizer.save_pretrained(folder)
        return str(folder)

    padded = distilling(models, teacher=teacher("padded", vocab_size=64), double=False)
    assert padded.step(random_batch())["opd_kl"] > 0
    with pytest.raises(ModelError, match="has logits for 60 ids, the model for 61"):
        distilling(models, teacher=teacher("short", vocab_size=60))


def test_more_top_tokens_than_the_vocabulary_has_are_refused_when_the_teacher_is_loaded(models):
    distilling(models, top_k=61)
    with pytest.raises(ConfigError, match=r"algorithm.top_k = 62 is more than the 61 tokens of the vocabulary"):
        distilling(models, top_k=62)


def test_a_teacher_that_is_not_there_is_named(models, tmp_path):
    with pytest.raises(ModelError, match="does not exist"):
        distilling(models, teacher=str(tmp_path / "nowhere"))
