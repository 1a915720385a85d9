"""On-policy distillation in the torch learner: loss, gradient, memory and routing."""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import numpy as np
import pytest
import torch
from algorithm_cases import build
from distillation_kit import ENV, distilling, routed
from learner_cases import Largest, flat, random_batch, sample, weights, without_seconds

from relax_gym.types import Batch
from relax_gym_trainers.functional import append_tail, divergence, reverse_kl, select_with_tail
from relax_gym_trainers.torch_learner.objectives import shape
from relax_gym_trainers.torch_learner.update import Tally, accumulate_policy_gradient, plan

pytest_plugins = ["distillation_fixtures"]

FORMS = [("reverse", 0.5), ("forward", 0.5), ("jsd", 0.5), ("jsd", 0.2)]


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
    shaped = shape(seen, {trainer.objectives[0]: range(len(seen))}, tally)
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
