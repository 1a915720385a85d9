"""On-policy distillation in the torch learner: loss, gradient, memory, routing, and teachers that do not answer."""

import dataclasses
import math
from functools import partial

import numpy as np
import pytest
import torch
from algorithm_cases import build
from learner_cases import (
    Largest,
    context,
    flat,
    learner,
    qwen3,
    random_batch,
    sample,
    save_model,
    weights,
    without_seconds,
)
from transformers import GPT2Config

from relax_gym.errors import ConfigError, ModelError, TrainingError
from relax_gym.teacher import Teacher, TeacherScores, checked_scores
from relax_gym.types import Batch
from relax_gym_trainers.functional import (
    append_tail,
    divergence,
    reverse_kl,
    select_with_tail,
)
from relax_gym_trainers.torch_learner.distillation import Distiller
from relax_gym_trainers.torch_learner.scores import by_group
from relax_gym_trainers.torch_learner.teacher import FrozenTeacher
from relax_gym_trainers.torch_learner.update import Tally, accumulate_policy_gradient, plan

GPT2 = GPT2Config(vocab_size=61, n_embd=64, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=1)
FORMS = [("reverse", 0.5), ("forward", 0.5), ("jsd", 0.5), ("jsd", 0.2)]
ENV = "test/None-v0"


# ---- the learner ---------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """A student and two teachers, folders of the same vocabulary."""
    root = tmp_path_factory.mktemp("models")
    made = {name: save_model(root / name, GPT2, seed) for name, seed in [("student", 0), ("t1", 1), ("t2", 2)]}
    made["qwen"] = save_model(root / "qwen", qwen3(), 3)
    for folder in made.values():
        context(folder).tokenizer.save_pretrained(folder)
    return made


def distilling(models, *, temperature=0.7, double=True, options=None, **algorithm):
    algorithm = {"name": "opd", **({} if "teachers" in algorithm else {"teacher": str(models["t1"])}), **algorithm}
    trainer = learner(context(models["student"], temperature=temperature, **algorithm), **(options or {}))
    if double:
        for policy in (
            trainer.policy,
            *(teacher.policy for teacher in trainer.objectives[0].distiller._teachers.values()),
        ):
            policy.model.double()
    return trainer


def gradient(trainer, samples, *, budget=10_000, share=True):
    part = plan(
        samples, budget=budget, share_prefix=share, skip_flat=False, apart=trainer.objectives[0].distiller.owner
    )
    old = [torch.from_numpy(b.logprobs) for b in part.micro_batches]
    trainer.optimizer.zero_grad()
    tally = Tally()
    loss = accumulate_policy_gradient(
        trainer.policy,
        trainer.objectives[0].algorithm,
        part,
        old=old,
        reference=None,
        tally=tally,
        first=True,
        step=1,
        distiller=trainer.objectives[0].distiller,
    )
    return loss, flat(trainer.policy.model), part, tally.metrics()


def plain(model, teacher, samples, form, top_k, temperature):
    """The definition: whole logits of both, one sample at a time; mean over samples of the mean over tokens."""
    model.zero_grad()
    loss, all_kl, all_q = 0.0, [], []
    for s in samples:
        ids = torch.from_numpy(s.token_ids.astype(np.int64))
        mask = torch.from_numpy(s.loss_mask[1:] == 1)
        p = (model(input_ids=ids[None]).logits[0, :-1][mask] / temperature).log_softmax(-1)
        with torch.no_grad():
            q = (teacher(input_ids=ids[None]).logits[0, :-1][mask] / temperature).log_softmax(-1)
        all_q.append(q.gather(-1, ids[1:][mask][:, None]))
        if top_k:
            top = q.topk(top_k).indices
            p, q = select_with_tail(p, top), append_tail(q.gather(-1, top))
        all_kl.append(form(p, q))
        loss = loss + all_kl[-1].mean() / len(samples)
    loss.backward()
    return loss.item(), flat(model), torch.cat(all_kl).mean().item(), torch.cat(all_q).mean().item()


@pytest.mark.parametrize(("form", "alpha"), FORMS)
@pytest.mark.parametrize("top_k", [0, 4])
def test_k36_loss_and_gradient_are_those_of_the_plain_definition(models, form, alpha, top_k):
    chosen = {"form": form, "top_k": top_k} | ({"jsd_alpha": alpha} if form == "jsd" else {})
    trainer = distilling(models, options={"logprob_chunk": 4}, **chosen)
    samples = [dataclasses.replace(s, advantages=0 * s.advantages) for s in random_batch().samples]
    loss, grad, _, metrics = gradient(trainer, samples)
    teacher = trainer.objectives[0].distiller._teachers[str(models["t1"])].policy.model
    expected_form = partial(divergence, form=form, alpha=alpha)
    expected = plain(trainer.policy.model, teacher, samples, expected_form, top_k, 0.7)
    assert loss == pytest.approx(expected[0], rel=1e-9)
    assert (grad - expected[1]).norm() <= 1e-9 * expected[1].norm()
    assert expected[1].norm() > 1e-3
    assert metrics["opd_kl"] == pytest.approx(expected[2], rel=1e-9)
    assert metrics["teacher_logprob"] == pytest.approx(expected[3], rel=1e-9)


def routed(samples):
    """Half of the samples are another env's."""
    return [dataclasses.replace(s, env_id="test/Other-v0" if i % 2 else ENV) for i, s in enumerate(samples)]


@pytest.mark.parametrize("top_k", [0, 4])
def test_two_teachers_are_routed_by_env_and_micro_batches_change_nothing(models, top_k):
    teachers = {ENV: str(models["t1"]), "test/Other-v0": str(models["t2"])}
    trainer = distilling(models, teachers=teachers, top_k=top_k, rl_weight=0.5, opd_weight=2.0, entropy_coef=0.01)
    samples = routed(random_batch(groups=3).samples)
    results, cuts = [], []
    for budget, share in ((10_000, True), (60, True), (60, False), (27, False)):
        loss, grad, part, metrics = gradient(trainer, samples, budget=budget, share=share)
        assert all(len({s.env_id for s in b.members}) == 1 for b in part.micro_batches)
        results.append((loss, grad, metrics))
        cuts.append(len(part.micro_batches))
    assert cuts[0] == 2 < cuts[1] <= cuts[2] < cuts[3]
    one_loss, one, one_metrics = results[0]
    for loss, grad, metrics in results[1:]:
        assert loss == pytest.approx(one_loss, rel=1e-9)
        assert (grad - one).norm() <= 1e-9 * one.norm()
        assert metrics["opd_kl"] == pytest.approx(one_metrics["opd_kl"], rel=1e-9)
        assert metrics["teacher_logprob"] == pytest.approx(one_metrics["teacher_logprob"], rel=1e-9)
    kls = []
    for env_id, name in teachers.items():
        own = [s for s in samples if s.env_id == env_id]
        teacher = trainer.objectives[0].distiller._teachers[name].policy.model
        kls.append((plain(trainer.policy.model, teacher, own, reverse_kl, top_k, 0.7)[2], own))
    total = sum(s.trained_tokens for s in samples)
    mean = sum(kl * sum(s.trained_tokens for s in own) for kl, own in kls) / total
    assert one_metrics["opd_kl"] == pytest.approx(mean, rel=1e-9)


def test_the_parts_of_the_loss_add_up(models):
    samples = random_batch().samples
    together = gradient(distilling(models, rl_weight=0.5, opd_weight=2.0), samples)
    teaching = gradient(distilling(models), [dataclasses.replace(s, advantages=0 * s.advantages) for s in samples])
    rewarded = gradient(distilling(models, opd_weight=1e-12), samples)
    # `advantages` has scaled these already in a run; here they are given.
    assert together[0] == pytest.approx(rewarded[0] + 2 * teaching[0], rel=1e-9)
    torch.testing.assert_close(together[1], rewarded[1] + 2 * teaching[1], rtol=1e-7, atol=1e-9)
    assert build("opd", teacher="t", rl_weight=0.5).advantages(np.array([1.0, 0, 0, 1])).tolist() == pytest.approx(
        [0.433012, -0.433012, -0.433012, 0.433012], abs=1e-6
    )
    assert build("opd", teacher="t").advantages(np.array([1.0, 0, 0, 1])).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("algorithm", [{}, {"top_k": 3}, {"level": "reward"}])
@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e30])
def test_k16_values_at_masked_positions_change_nothing(models, algorithm, poison):
    def poisoned(s):
        off = s.loss_mask == 0
        return dataclasses.replace(s, logprobs=np.where(off, np.float32(poison), s.logprobs))

    results = []
    for batch in (random_batch(), random_batch()):
        samples = batch.samples if not results else [poisoned(s) for s in batch.samples]
        trainer = distilling(models, double=False, **algorithm)
        results.append((without_seconds(trainer.step(Batch(version=0, samples=samples))), weights(trainer)))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(results[0][1][name], results[1][1][name]) for name in results[0][1])


def test_k36_the_reward_form_scores_at_the_temperature_and_changes_each_tokens_advantage(models):
    trainer = distilling(models, level="reward", opd_weight=0.5, double=False)
    seen = random_batch().samples
    teacher = trainer.objectives[0].distiller._teachers[str(models["t1"])].policy.model
    tally = Tally()
    shaped = trainer.objectives[0].shape(seen, tally)
    gaps = []
    for before, after in zip(seen, shaped, strict=True):
        on = before.loss_mask == 1
        ids = torch.from_numpy(before.token_ids.astype(np.int64))
        with torch.no_grad():
            log_q = (teacher(input_ids=ids[None]).logits[0, :-1] / 0.7).log_softmax(-1)
        q = log_q.gather(-1, ids[1:, None])[:, 0].numpy()[on[1:]]
        gaps.append(before.logprobs[on] - q)
        np.testing.assert_allclose(after.advantages[on], before.advantages[on] - 0.5 * gaps[-1], rtol=0, atol=1e-5)
        assert (after.advantages[~on] == 0).all()
    assert tally.metrics()["opd_kl"] == pytest.approx(np.concatenate(gaps).mean(), abs=1e-5)
    metrics = trainer.step(Batch(version=0, samples=seen))
    assert metrics["opd_kl"] == tally.metrics()["opd_kl"]
    assert metrics["grad_norm"] > 0


def test_a_teacher_that_is_the_student_has_nothing_to_say(models):
    samples = [dataclasses.replace(s, advantages=0 * s.advantages) for s in random_batch().samples]
    trainer = distilling(models, teacher=str(models["student"]))
    loss, grad, _, metrics = gradient(trainer, samples)
    assert abs(loss) < 1e-12
    assert grad.abs().max() < 1e-12
    assert abs(metrics["opd_kl"]) < 1e-12


def test_unscored_episodes_are_distilled_too(models):
    one = dataclasses.replace(sample([3, 4, 5, 6], [0, 0, 1, 1], advantage=0.0), reward=None)
    for algorithm in ({}, {"level": "reward", "old_logprobs": "recompute"}):
        assert distilling(models, **algorithm).step(Batch(version=0, samples=[one]))["grad_norm"] > 0


def test_a_teacher_of_another_architecture_and_a_head_that_is_not_understood(models):
    trainer = distilling(models, teacher=str(models["qwen"]))
    samples = random_batch().samples
    loss, grad, _, _ = gradient(trainer, samples)
    trainer.policy.head = None
    trainer.objectives[0].distiller._teachers[str(models["qwen"])].policy.head = None
    other_loss, other_grad, _, _ = gradient(trainer, samples)
    assert other_loss == pytest.approx(loss, rel=1e-6)
    assert (grad - other_grad).norm() <= 1e-6 * grad.norm()


def test_in_bfloat16_the_teacher_weighs_half_and_says_nearly_the_same(models):
    exact = distilling(models, double=False)
    rough = distilling(models, double=False, options={"dtype": "bfloat16"})
    (teacher,) = rough.objectives[0].distiller._teachers.values()
    assert {p.dtype for p in teacher.policy.model.parameters()} == {torch.bfloat16}
    assert teacher.policy.share_prefix
    batch = random_batch()
    assert rough.step(batch)["opd_kl"] == pytest.approx(exact.step(batch)["opd_kl"], rel=0.05)


def test_closing_frees_the_teachers(models):
    trainer = distilling(models, double=False)
    (teacher,) = trainer.objectives[0].distiller._teachers.values()
    trainer.close()
    trainer.close()
    assert teacher.policy.device.type == "meta"


@pytest.mark.parametrize("top_k", [0, 4])
def test_no_tensor_is_larger_than_the_logits_of_one_chunk(models, top_k):
    trainer = distilling(models, top_k=top_k, double=False, options={"logprob_chunk": 64})
    student, (teacher,) = trainer.policy, trainer.objectives[0].distiller._teachers.values()
    vocabulary, tokens_ = 2000, 512
    for policy, seed in ((student, 0), (teacher.policy, 1)):
        weight = torch.randn(vocabulary, 8, generator=torch.Generator().manual_seed(seed), requires_grad=seed == 0)
        policy.head = dataclasses.replace(policy.head, weight=weight)
        policy.features = lambda batch: torch.ones(tokens_, 8).cumsum(0).sin().requires_grad_(torch.is_grad_enabled())
    one = sample([1] * (tokens_ + 1), [0] + [1] * tokens_)
    (batch,) = plan([one], budget=10_000, share_prefix=True, skip_flat=False).micro_batches
    with Largest() as largest:
        *_, kl, _ = trainer.objectives[0].distiller.score(student, batch)
        kl.sum().backward()
    assert student.head.weight.grad.norm() > 0
    assert largest.elements <= 64 * vocabulary < tokens_ * vocabulary / 4


# ---- teachers ------------------------------------------------------------------------------------


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
