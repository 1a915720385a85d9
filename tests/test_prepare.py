"""What a learner computes before a step is what the step would have computed, bit for bit."""

import pytest
import torch
from learner_cases import context, learner, qwen3, random_batch, save_model, weights, without_seconds

from relax_gym_trainers.torch_learner.policy import Policy
from relax_gym_trainers.torch_learner.scores import by_group

ALGORITHMS = [
    ({"kl_coef": 0.1}, {}),
    ({"kl_reward_coef": 0.1}, {}),
    ({"kl_reward_coef": 0.1, "old_logprobs": "recompute"}, {}),
    ({"kl_coef": 0.1, "old_logprobs": "recompute"}, {"epochs": 2}),
    ({"old_logprobs": "recompute"}, {"updates_per_step": 2}),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, one_thread):
    return save_model(tmp_path_factory.mktemp("tiny"), qwen3())


def forwards(trainer, monkeypatch):
    """Counts micro-batches that are scored without a gradient."""
    seen = []
    score = Policy.score

    def counted(self, batch):
        if not torch.is_grad_enabled():
            seen.append(len(batch.members))
        return score(self, batch)

    monkeypatch.setattr(Policy, "score", counted)
    return seen


@pytest.mark.parametrize(("algorithm", "options"), ALGORITHMS)
@pytest.mark.parametrize("prepared", ["all", "some", "twice"])
def test_preparing_changes_no_bit(tiny, monkeypatch, algorithm, options, prepared):
    runs = []
    for ahead in (False, True):
        trainer = learner(context(tiny, groups=4, **algorithm), micro_batch_tokens=60, **options)
        seen, metrics = forwards(trainer, monkeypatch), []
        for step in range(3):
            batch = random_batch(step, groups=4)
            groups = by_group(batch.samples)
            if ahead:
                for group in {"all": groups, "some": groups[1:3], "twice": [*reversed(groups), *groups]}[prepared]:
                    trainer.prepare(group)
            before = len(seen)
            metrics.append(without_seconds(trainer.step(batch)))
            if prepared != "some":
                assert (len(seen) == before) is ahead  # nothing is left to be scored in the step
        runs.append((metrics, weights(trainer)))
    (plain, expected), (found, got) = runs
    assert found == plain
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


def test_what_was_prepared_for_other_weights_is_not_used(tiny):
    """The same samples in two steps: old log-probs of the first are none of the second."""
    algorithm, options = {"old_logprobs": "recompute"}, {"updates_per_step": 2, "lr": 1e-2}
    ahead, plain = (learner(context(tiny, **algorithm), **options) for _ in range(2))
    batch = random_batch(5)
    for trainer in (ahead, plain):
        for _ in range(2):
            if trainer is ahead:
                for group in by_group(batch.samples):
                    trainer.prepare(group)
            trainer.step(batch)
    expected = weights(plain)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(ahead).items())


def test_nothing_is_scored_for_an_algorithm_that_asks_for_nothing(tiny, monkeypatch):
    trainer = learner(context(tiny))
    seen = forwards(trainer, monkeypatch)
    for group in by_group(random_batch().samples):
        trainer.prepare(group)
    assert seen == []
