"""Envs of a mixture with algorithms of their own, in one optimizer update."""

import dataclasses

import pytest
import torch
from learner_cases import context, flat, learner, plain_logprobs, qwen3, random_batch, save_model

from relax_gym.algorithm import TrainedTokens
from relax_gym.types import Batch
from relax_gym_trainers.torch_learner.update import Tally


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), qwen3())


def run(tiny, *envs, **algorithm):
    """A context whose config has these `[[env]]` entries beside a common algorithm."""
    plain = context(tiny, groups=4, **algorithm)
    data = plain.config.model_dump()
    data["env"] = [{"id": "test/None-v0", **env} for env in envs]
    return dataclasses.replace(plain, config=type(plain.config).model_validate(data))


def mixed() -> Batch:
    """Four groups, the odd ones from the second env."""
    batch = random_batch(groups=4, size=3)
    names = list(dict.fromkeys(s.group_id for s in batch.samples))
    samples = [dataclasses.replace(s, mixture=names.index(s.group_id) % 2) for s in batch.samples]
    return Batch(version=0, samples=samples)


def exact(run, **options):
    trainer = learner(run, **options)
    trainer.policy.model.double()
    return trainer


def gradient(trainer, batch):
    """Loss and gradient of the step's only update."""
    (pieces,) = trainer._plan(batch.samples, Tally())
    trainer.optimizer.zero_grad()
    loss = sum(trainer.backend.accumulate(piece, tally=Tally(), first=True, step=1) for piece in pieces)
    return loss, flat(trainer.policy.model)


def defined(trainer, batch):
    """The definition: Σ_env loss_weight · Σ over its samples of the env's loss, over the totals of the whole batch."""
    samples = batch.samples
    total = 0.0
    for one, (logprobs, _) in zip(samples, plain_logprobs(trainer.policy.model, samples), strict=True):
        objective = trainer.objectives[one.mixture]
        on = one.loss_mask == 1
        old = torch.from_numpy(one.logprobs[on]).double()
        losses = objective.algorithm.token_loss(
            TrainedTokens(
                logprobs=logprobs,
                old_logprobs=old,
                rollout_logprobs=old,
                advantages=torch.from_numpy(one.advantages[on]).double(),
                sample=torch.zeros(len(old), dtype=torch.int64),
                num_samples=1,
            )
        )
        share = {
            "token-mean": 1 / sum(s.trained_tokens for s in samples),
            "seq-mean-token-mean": 1 / (len(samples) * one.trained_tokens),
            "seq-mean-token-sum-norm": 1 / (len(samples) * 7.0),
        }[objective.algorithm.aggregation]
        total = total + objective.loss_weight * share * losses.sum()
    trainer.optimizer.zero_grad()
    total.backward()
    return total.item(), flat(trainer.policy.model)


def assert_same(one, two):
    assert one[0] == pytest.approx(two[0], rel=1e-6)
    assert (one[1] - two[1]).norm() <= 1e-6 * two[1].norm()


SUM_NORM = {"algorithm": {"name": "dr_grpo", "token_sum_norm": 7.0}}
MIXTURES = {
    "two-algorithms": ({}, {"algorithm": {"name": "sapo"}}),
    "two-aggregations": ({"algorithm": {"name": "dapo"}}, SUM_NORM),
    "two-weights": ({"loss_weight": 0.25}, {"loss_weight": 3.0}),
    "all-at-once": (
        {"algorithm": {"name": "gspo", "clip_low": 0.3}, "loss_weight": 2.0},
        {**SUM_NORM, "loss_weight": 0.1},
    ),
}


@pytest.mark.parametrize("budget", [10_000, 30])
@pytest.mark.parametrize("envs", MIXTURES)
def test_the_gradient_of_a_mixture_is_the_weighted_sum_of_each_envs_own_loss(tiny, envs, budget):
    trainer = exact(run(tiny, *MIXTURES[envs]), micro_batch_tokens=budget)
    assert_same(gradient(trainer, mixed()), defined(trainer, mixed()))


def test_the_envs_of_these_mixtures_pull_in_their_own_direction(tiny):
    got = [gradient(exact(run(tiny, *envs)), mixed())[1] for envs in MIXTURES.values()]
    got.append(gradient(exact(run(tiny, {}, {})), mixed())[1])
    for i, one in enumerate(got):
        for two in got[i + 1 :]:
            assert torch.cosine_similarity(one, two, dim=0) < 0.999


def test_the_same_algorithm_twice_is_that_algorithm_once(tiny):
    own = {"algorithm": {"name": "grpo", "aggregation": "token-mean"}}
    once = gradient(exact(run(tiny, {}, {}, aggregation="token-mean")), mixed())
    assert_same(gradient(exact(run(tiny, own, own)), mixed()), once)


def test_each_sample_gets_the_loss_of_its_env(tiny):
    trainer = learner(run(tiny, {}, {"algorithm": {"name": "sft"}, "loss_weight": 0.5}))
    assert [type(o.algorithm).__name__ for o in trainer.objectives] == ["GRPO", "SFT"]
    batch = mixed()
    updates = trainer._plan(batch.samples, Tally())
    (pieces,) = updates
    by_name = {type(piece.objective.algorithm).__name__: piece.part for piece in pieces}
    total = sum(s.trained_tokens for s in batch.samples)
    assert {part.total_tokens for part in by_name.values()} == {total}
    assert by_name["SFT"].loss_weight == 0.5
    for name, mixture in (("GRPO", 0), ("SFT", 1)):
        members = [m for b in by_name[name].micro_batches for m in b.members]
        assert {m.mixture for m in members} == {mixture}


@pytest.mark.parametrize("coefficient", [0.1, 1e-9])
def test_envs_that_share_an_algorithm_are_whitened_together_whatever_their_weights(tiny, coefficient):
    shifted = [
        dataclasses.replace(s, advantages=s.advantages + 10.0 * s.mixture * s.loss_mask) for s in mixed().samples
    ]

    def advantages(weight):
        envs = ({}, {"loss_weight": weight})
        algorithm = {"name": "reinforce_pp", "kl_reward_coef": coefficient, "old_logprobs": "rollout"}
        trainer = learner(run(tiny, *envs, **algorithm))
        (pieces,) = trainer._plan(shifted, Tally())
        members = [one for piece in pieces for batch in piece.part.micro_batches for one in batch.members]
        return {one.episode_id: one.advantages for one in members}

    once, apart = advantages(1.0), advantages(0.5)
    assert once.keys() == apart.keys()
    for name, values in once.items():
        torch.testing.assert_close(torch.from_numpy(apart[name]), torch.from_numpy(values))


def test_the_weight_of_an_envs_loss_scales_its_gradient(tiny):
    batch = mixed()
    silent = [dataclasses.replace(s, advantages=s.advantages * (s.mixture == 1)) for s in batch.samples]

    def of(weight):
        trainer = exact(run(tiny, {}, {"loss_weight": weight}, aggregation="token-mean"))
        return gradient(trainer, Batch(version=0, samples=silent))

    loss, whole = of(1.0)
    assert_same(of(0.25), (0.25 * loss, 0.25 * whole))
