"""Off-policy corrections: their numbers, that they are constants, and what the learner does with them."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from algorithm_cases import build, t, tokens
from learner_cases import context, learner, qwen3, random_batch, sample, save_model, without_seconds

from relax_gym.types import Batch
from relax_gym_trainers.functional import icepop_weight, keeps_sequence, ppo_clip_loss, truncated_weight
from relax_gym_trainers.objective import correction_weight, mismatch, policy_loss
from relax_gym_trainers.torch_learner.objectives import shape
from relax_gym_trainers.torch_learner.update import Tally

LN3 = math.log(3)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("models") / "qwen3", qwen3())


def recompute(**options):
    return build("grpo", old_logprobs="recompute", **options)


# ---- weights -------------------------------------------------------------------------------------


def test_weights_of_ln_3():
    assert truncated_weight(t(LN3), cap=2.0).tolist() == [2.0]
    assert icepop_weight(t(LN3), low=0.5, high=2.0).tolist() == [0.0]


def test_tis_cuts_above_only_and_icepop_on_both_sides():
    log_ratio = t(-5.0, math.log(0.4), 0.0, math.log(1.9), 800.0)
    assert truncated_weight(log_ratio, cap=2.0).tolist() == pytest.approx([math.exp(-5), 0.4, 1.0, 1.9, 2.0])
    assert icepop_weight(log_ratio, low=0.5, high=2.0).tolist() == pytest.approx([0, 0, 1.0, 1.9, 0])


def test_sequence_mask_drops_only_bad_samples_that_drifted():
    kept = keeps_sequence(t(-1, -1, 1, 0), t(0.3, 0.1, 0.3, 0.3), delta=0.2)
    assert kept.tolist() == [False, True, True, True]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1, 1, 1]),
        ({"correction": "tis"}, [2, 1, 0.5]),
        ({"correction": "tis", "correction_cap": 4.0}, [3, 1, 0.5]),
        ({"correction": "icepop"}, [0, 1, 0.5]),
        ({"correction": "icepop", "icepop_low": 0.6, "icepop_high": 3.5}, [3, 1, 0]),
        ({"correction": "tis", "correction_level": "sequence"}, [math.sqrt(3), math.sqrt(3), 0.5]),
        ({"correction": "icepop", "correction_level": "sequence"}, [math.sqrt(3), math.sqrt(3), 0.5]),
    ],
)
def test_weights_by_name_and_level(options, expected):
    rollout = [-1 - LN3, -1, -1 + math.log(2)]
    whole = tokens(t(-1, -1, -1), [1, 1, 1], rollout=rollout, sample=[0, 0, 1])
    assert correction_weight(recompute(**options), whole).tolist() == pytest.approx(expected)


def test_sequence_masking_measures_drift_from_the_sampler_per_token():
    # Mean ℓ_roll − ℓ: 0.3 in sample 0, 0.1 in sample 1, 0.5 in sample 2, whose advantage is positive.
    whole = tokens(
        t(-1.2, -1.4, -1.1, -1.5), [-1, -1, -1, 1], old=[-9] * 4, rollout=[-1, -1, -1, -1], sample=[0, 0, 1, 2]
    )
    assert correction_weight(recompute(sequence_mask_delta=0.2), whole).tolist() == [0, 0, 1, 1]
    loss = policy_loss(recompute(sequence_mask_delta=0.2), whole)
    assert loss[:2].tolist() == [0, 0]
    assert loss[2:].abs().min() > 0


def test_corrections_and_masks_multiply():
    whole = tokens(t(-1, -1), [-1, 1], rollout=[-1 + math.log(2), -1 - LN3])
    both = recompute(correction="tis", sequence_mask_delta=0.5)
    assert correction_weight(both, whole).tolist() == pytest.approx([0, 2])


# ---- loss ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("correction", ["tis", "icepop"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_weight_multiplies_the_loss_and_has_no_gradient(correction, level):
    options = {"correction": correction, "correction_level": level, "sequence_mask_delta": 0.4}
    algorithm, advantages, rollout = recompute(**options), [1.0, -0.7, 0.5], [-1.6, -0.8, -1.1]

    def loss(logprobs):
        return policy_loss(
            algorithm, tokens(logprobs, advantages, old=[-1, -1.1, -1], rollout=rollout, sample=[0, 0, 1])
        )

    start = t(-1.05, -1.0, -0.95).requires_grad_()
    weight = correction_weight(
        algorithm, tokens(start, advantages, old=[-1, -1.1, -1], rollout=rollout, sample=[0, 0, 1])
    )
    assert not weight.requires_grad
    plain = recompute().token_loss(tokens(start, advantages, old=[-1, -1.1, -1], sample=[0, 0, 1]))
    torch.testing.assert_close(loss(start), weight * plain)
    assert torch.autograd.gradcheck(loss, start)


def test_a_dropped_token_of_infinite_loss_is_selected_away():
    broken = tokens(t(900.0, -1.0), [-1.0, 1.0], old=[-1, -1], rollout=[-99, -1])
    loss = policy_loss(recompute(correction="icepop"), broken)
    assert loss.tolist() == [0.0, -1.0]


def test_decoupled_ppo_takes_each_tokens_behaviour_from_the_version_that_sampled_it():
    """π/π_old is clipped, π_old/π_behaviour is a weight; two tokens of one sample come from two versions."""
    logprobs, proximal, behaviour = t(-0.6, -1.3), t(-1.0, -1.2), t(-1.5, -1.1)
    whole = tokens(logprobs, [1.0, 1.0], old=proximal.tolist(), rollout=behaviour.tolist(), sample=[0, 0])
    clipped = ppo_clip_loss((logprobs - proximal).exp(), t(1, 1), clip_low=0.2, clip_high=0.2)
    expected = clipped * (proximal - behaviour).exp()
    assert expected.tolist() == pytest.approx([-1.2 * math.exp(0.5), -math.exp(-0.2)])
    torch.testing.assert_close(policy_loss(recompute(correction="tis"), whole), expected)


# ---- in the learner ------------------------------------------------------------------------------


def test_mismatch_by_token():
    whole = tokens(t(-1, -1, -1), [1, 1, 1], rollout=[-1, -1 - LN3, -1 + LN3])
    gaps = mismatch(build("grpo"), whole)
    assert gaps["mean"].tolist() == pytest.approx([0, LN3, LN3])
    # Δ = ℓ_roll − ℓ is −ln 3, then ln 3: e^{−Δ} − 1 + Δ.
    assert gaps["k3"].tolist() == pytest.approx([0, 3 - 1 - LN3, 1 / 3 - 1 + LN3])
    assert gaps["clipped"].tolist() == [False, True, False]
    assert mismatch(recompute(correction="icepop"), whole)["clipped"].tolist() == [False, True, True]


@pytest.mark.parametrize(("correction", "cut"), [("tis", [False] * 3 + [True]), ("icepop", [False] * 3 + [True])])
def test_what_is_clipped_is_what_the_correction_cuts_at_its_level(correction, cut):
    # Geometric means: √3 in sample 0, 1 in sample 1, 4 in sample 2; the first token's own ratio is 3.
    rollout = [-1 - LN3, -1, -1, -1 - math.log(4)]
    whole = tokens(t(-1, -1, -1, -1), [1] * 4, rollout=rollout, sample=[0, 0, 1, 2])
    assert mismatch(recompute(correction=correction, correction_level="sequence"), whole)["clipped"].tolist() == cut
    assert mismatch(recompute(correction=correction), whole)["clipped"].tolist() == [True, False, False, True]


def test_the_gap_to_the_sampler_is_always_logged_and_its_correction_when_there_is_one(tiny):
    gaps = {f"logprob_diff_{name}" for name in ("mean", "max", "k3", "clipped", "tokens")}
    plain = learner(context(tiny, old_logprobs="recompute")).step(random_batch())
    assert gaps <= set(plain)
    assert not {"correction_weight", "correction_dropped"} & set(plain)
    options = {"correction": "icepop", "icepop_low": 0.9, "icepop_high": 1.1, "old_logprobs": "recompute"}
    popped = learner(context(tiny, **options)).step(random_batch())
    assert gaps | {"correction_weight", "correction_dropped"} <= set(popped)
    assert popped["correction_dropped"] == popped["logprob_diff_clipped"] > 0
    assert popped["logprob_diff_mean"] == plain["logprob_diff_mean"]


def test_the_number_of_tokens_compared_with_the_sampler_is_logged(tiny):
    samples = list(random_batch().samples)
    samples[0] = dataclasses.replace(samples[0], advantages=np.zeros_like(samples[0].advantages))
    batch = Batch(version=0, samples=samples)
    scored = sum(s.trained_tokens for s in samples[1:])
    assert learner(context(tiny)).step(batch)["logprob_diff_tokens"] == scored
    assert learner(context(tiny, entropy_coef=0.1)).step(batch)["logprob_diff_tokens"] == batch.trained_tokens
    first = sum(s.trained_tokens for s in samples[1:3])
    assert learner(context(tiny), updates_per_step=2).step(batch)["logprob_diff_tokens"] == first
    flat = [dataclasses.replace(s, advantages=np.zeros_like(s.advantages)) for s in samples]
    nothing = learner(context(tiny)).step(Batch(version=0, samples=flat))
    assert nothing["logprob_diff_tokens"] == 0
    assert "logprob_diff_mean" not in nothing


def test_without_a_gap_a_correction_changes_nothing(tiny):
    trainer = learner(context(tiny, old_logprobs="recompute"))
    part = trainer.objectives[0].part(random_batch().samples, skip_flat=False)
    with torch.no_grad():
        scores = [trainer.policy.score(b)[0] for b in part.micro_batches]
    exact = [
        sample(s.token_ids, s.loss_mask, advantage=s.advantages.max() + s.advantages.min(), episode=s.episode_id)
        for s in part.micro_batches[0].members
    ]
    values = np.split(scores[0].numpy(), np.cumsum(part.micro_batches[0].token_counts)[:-1])
    for one, own in zip(exact, values, strict=True):
        one.logprobs[one.loss_mask == 1] = own
    batch = Batch(version=0, samples=exact)
    plain = without_seconds(trainer.step(batch))
    tis = without_seconds(learner(context(tiny, old_logprobs="recompute", correction="tis")).step(batch))
    assert tis.pop("correction_weight") == pytest.approx(1.0, abs=1e-5)
    assert tis.pop("correction_dropped") == 0
    assert tis == pytest.approx(plain, rel=1e-4, abs=1e-6)


def test_kl_in_the_reward_leaves_no_kl_loss_and_moves_towards_the_reference(tiny):
    trainer = learner(context(tiny, name="reinforce_pp", kl_reward_coef=0.5, old_logprobs="recompute"), lr=1e-2)
    first = trainer.step(random_batch())
    assert first["kl_reward"] == pytest.approx(0.0, abs=1e-6)
    assert "kl" not in first
    assert trainer.step(random_batch())["kl_reward"] != 0.0


@pytest.mark.parametrize("cut", [{"micro_batch_tokens": 30}, {"micro_batch_tokens": 30, "share_prefix": False}])
def test_k25_whitening_with_kl_is_over_the_global_batch_however_it_is_cut(tiny, cut):
    shaped = []
    for options in ({}, cut):
        trainer = learner(context(tiny, name="reinforce_pp", kl_reward_coef=0.5), **options)
        trainer.policy.model.double()
        samples = random_batch().samples
        shaped.append(shape(samples, {trainer.objectives[0]: range(len(samples))}, Tally()))
    for one, two in zip(*shaped, strict=True):
        np.testing.assert_allclose(one.advantages, two.advantages, atol=1e-5)
    trained = np.concatenate([s.advantages[s.loss_mask == 1] for s in shaped[0]])
    assert trained.mean() == pytest.approx(0.0, abs=1e-6)
    assert trained.std(ddof=1) == pytest.approx(1.0, abs=1e-6)
