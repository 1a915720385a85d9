"""Envs of a mixture with algorithms of their own, in one optimizer update."""

import dataclasses

import pytest
import torch
from learner_cases import context, learner, qwen3, random_batch, save_model

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


def weights_after(trainer, batch):
    metrics = trainer.step(batch)
    return [p.detach().clone() for p in trainer.parameters], metrics


def test_the_same_algorithm_twice_is_that_algorithm_once(tiny):
    own = {"algorithm": {"name": "grpo", "aggregation": "token-mean"}}
    twice, _ = weights_after(learner(run(tiny, own, own)), mixed())
    once, _ = weights_after(learner(run(tiny, {}, {}, aggregation="token-mean")), mixed())
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(twice, once, strict=True))


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


def test_the_weight_of_an_envs_loss_scales_its_gradient(tiny):
    batch = mixed()
    silent = [dataclasses.replace(s, advantages=s.advantages * (s.mixture == 1)) for s in batch.samples]

    def norm(weight):
        trainer = learner(run(tiny, {}, {"loss_weight": weight}, aggregation="token-mean"))
        return trainer.step(Batch(version=0, samples=silent))["grad_norm"]

    assert norm(0.25) == pytest.approx(0.25 * norm(1.0), rel=1e-4)
