"""Scores and gradients against the plain definition: one sample at a time, full logits, no packing."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from learner_cases import (
    SMALL,
    context,
    flat,
    gradient,
    learner,
    plain_logprobs,
    qwen3,
    random_batch,
    sample,
    save_model,
    weights,
    without_seconds,
)
from transformers import (
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MambaConfig,
    OPTConfig,
)

from relax_gym.types import Batch
from relax_gym_trainers.functional import ppo_clip_loss
from relax_gym_trainers.torch_learner.logprobs import Head, _HeadLogProbs
from relax_gym_trainers.torch_learner.packing import pack
from relax_gym_trainers.torch_learner.policy import Policy
from relax_gym_trainers.torch_learner.update import plan, score_all

GPT2 = GPT2Config(vocab_size=61, n_embd=64, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("models") / "qwen3", qwen3())


@pytest.fixture(scope="session")
def exact(tmp_path_factory):
    """A model all of whose arithmetic is float64 once it is told so (most norms keep a float32 core)."""
    return save_model(tmp_path_factory.mktemp("models") / "gpt2", GPT2)


# ---- scores --------------------------------------------------------------------------------------


# Config; whether prompts can be shared; whether the head is understood; exactness in float64 (some compute in float32).
FAMILIES = {
    "qwen3": (qwen3(), True, True, 1e-9),
    "llama-untied": (LlamaConfig(**SMALL, tie_word_embeddings=False, attention_bias=True), True, True, 1e-9),
    "gemma2-softcap-window": (Gemma2Config(**SMALL, head_dim=16, sliding_window=6), False, True, 1e-5),
    "cohere-logit-scale": (CohereConfig(**SMALL, logit_scale=0.25), True, True, 1e-9),
    "granite-logits-scaling": (GraniteConfig(**SMALL, logits_scaling=4.0), True, True, 1e-9),
    "gpt2-absolute-positions": (GPT2, True, True, 1e-9),
    "mamba": (
        MambaConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2, state_size=4, bos_token_id=0, eos_token_id=1),
        False,
        True,
        1e-5,
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_k26_scores_equal_the_plain_forward_for_unequal_lengths(family, tmp_path):
    config, shares, plain_head, tolerance = FAMILIES[family]
    trainer = learner(context(save_model(tmp_path, config), temperature=0.7))
    assert trainer.policy.share_prefix is shares
    assert (trainer.policy.head is not None) is plain_head
    trainer.policy.model.double()
    samples = random_batch().samples
    part = plan(samples, budget=10_000, share_prefix=trainer.policy.share_prefix, skip_flat=False)
    (batch,) = part.micro_batches
    got = trainer.policy.score(batch)
    expected = plain_logprobs(trainer.policy.model, samples, 0.7)
    # The sampler's log-probs in these samples are all different, so they say which token is which.
    mine = batch.logprobs.argsort()
    theirs = np.concatenate([s.logprobs[s.loss_mask == 1] for s in samples]).argsort()
    for index in (0, 1):
        values = torch.cat([pair[index] for pair in expected])
        torch.testing.assert_close(got[index][mine], values[theirs], rtol=0, atol=tolerance, check_dtype=False)


def test_float32_scores_are_within_1e_5(tiny):
    trainer = learner(context(tiny))
    samples = random_batch().samples[:3]
    (batch,) = plan(samples, budget=10_000, share_prefix=True, skip_flat=False).micro_batches
    expected = torch.cat([logprobs for logprobs, _ in plain_logprobs(trainer.policy.model, samples)])
    torch.testing.assert_close(score_all(trainer.policy, [batch])[0], expected, rtol=0, atol=1e-5)


def test_an_eager_model_shares_prompts_too(tmp_path):
    trainer = learner(context(save_model(tmp_path, qwen3(attn_implementation="eager"))))
    trainer.policy.model.set_attn_implementation("eager")
    samples = random_batch().samples[:3]
    (batch,) = plan(samples, budget=10_000, share_prefix=True, skip_flat=False).micro_batches
    expected = torch.cat([logprobs for logprobs, _ in plain_logprobs(trainer.policy.model, samples)])
    torch.testing.assert_close(score_all(trainer.policy, [batch])[0], expected, rtol=0, atol=1e-5)


def test_a_head_that_is_not_understood_falls_back_to_the_models_logits(tiny):
    trainer = learner(context(tiny))
    samples = random_batch().samples[:3]
    (batch,) = plan(samples, budget=10_000, share_prefix=True, skip_flat=False).micro_batches
    (expected,) = score_all(trainer.policy, [batch])
    trainer.policy.head = None
    torch.testing.assert_close(score_all(trainer.policy, [batch])[0], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("never", [None, torch.tensor([2, 5])])
def test_the_chunked_head_has_the_right_gradients(softcap, bias, never):
    generator = torch.Generator().manual_seed(0)

    def tensor(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator, requires_grad=True)

    hidden, weight, offset = tensor(5, 3), tensor(7, 3), tensor(7) if bias else None
    head = Head(weight=weight, bias=offset, scale=1.5, softcap=softcap, temperature=0.8, never=never)
    targets = torch.tensor([0, 6, 3, 3, 1])
    assert torch.autograd.gradcheck(
        lambda h, w, b: _HeadLogProbs.apply(h, w, b, targets, head, torch.float64, 2), (hidden, weight, offset)
    )


def test_a_vocabulary_entry_of_minus_infinity_makes_no_nan():
    hidden, weight = torch.ones(2, 3, requires_grad=True), torch.zeros(4, 3, requires_grad=True)
    bias = torch.tensor([0.0, 0.0, -math.inf, 0.0])
    head = Head(weight=weight, bias=bias, scale=1.0, softcap=None, temperature=1.0)
    logprobs, entropy = _HeadLogProbs.apply(hidden, weight, bias, torch.tensor([0, 1]), head, torch.float32, 8)
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs.tolist() == pytest.approx([-math.log(3)] * 2)
    assert entropy.tolist() == pytest.approx([math.log(3)] * 2)
    assert weight.grad[:, 0].tolist() == pytest.approx([1 - 2 / 3, 1 - 2 / 3, 0.0, -2 / 3], abs=1e-6)
    assert hidden.grad.isfinite().all()


@pytest.mark.parametrize("headless", [False, True])
def test_ids_that_are_never_sampled_are_in_no_distribution(tiny, headless):
    trainer = learner(context(tiny))
    never, (sample, *_) = (2, 7), random_batch().samples
    policy = Policy(
        trainer.policy.model, temperature=0.7, dtype=torch.float32, chunk=4, share_prefix=False, never_sampled=never
    )
    policy.head = None if headless else policy.head
    (batch,) = pack([sample], budget=10_000, share_prefix=False)
    with torch.no_grad():
        logprobs, entropy = policy.score(batch)
        logits = policy.model(input_ids=torch.tensor(sample.token_ids[None].astype(int))).logits[0] / 0.7
    logits[:, list(never)] = -torch.inf
    table = logits[torch.tensor(batch.predictors)].log_softmax(-1)
    torch.testing.assert_close(logprobs, table.gather(-1, torch.tensor(batch.targets)[:, None])[:, 0])
    expected = torch.distributions.Categorical(logits=logits[torch.tensor(batch.predictors)]).entropy()
    torch.testing.assert_close(entropy, expected)


def test_k36_one_temperature_for_new_old_and_reference(tiny):
    trainer = learner(context(tiny, temperature=0.5, kl_coef=0.1, old_logprobs="recompute"), epochs=2, lr=1e-9)
    samples = random_batch().samples
    with torch.no_grad():
        scores = plain_logprobs(trainer.policy.model, samples, 0.5)
    exact = []
    for s, (logprobs, _) in zip(samples, scores, strict=True):
        values = np.zeros(len(s.token_ids), dtype=np.float32)
        values[s.loss_mask == 1] = logprobs.numpy()
        exact.append(dataclasses.replace(s, logprobs=values))
    metrics = trainer.step(Batch(version=0, samples=exact))
    assert metrics["logprob_diff_max"] < 1e-5
    assert metrics["kl"] < 1e-9
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-6)


# ---- gradients -----------------------------------------------------------------------------------


def plain_gradient(model, algorithm, samples, temperature=1.0):
    """The definition: token-mean of the clipped loss over all trained tokens, minus the entropy bonus."""
    model.zero_grad()
    total = sum(s.trained_tokens for s in samples)
    loss = 0.0
    for s, (logprobs, entropy) in zip(samples, plain_logprobs(model, samples, temperature), strict=True):
        mask = s.loss_mask == 1
        ratio = (logprobs - torch.from_numpy(s.logprobs[mask])).exp()
        clipped = ppo_clip_loss(ratio, torch.from_numpy(s.advantages[mask]), clip_low=0.2, clip_high=0.2)
        loss = loss + (clipped - algorithm.entropy_coef * entropy).sum() / total
    loss.backward()
    return loss.item(), flat(model)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("model", "tolerance"), [("exact", 1e-9), ("tiny", 1e-6)])
def test_the_gradient_is_that_of_the_plain_definition(request, model, tolerance, share, checkpointing):
    run = context(request.getfixturevalue(model), temperature=0.9, entropy_coef=0.02, aggregation="token-mean")
    trainer = learner(run, activation_checkpointing=checkpointing, logprob_chunk=4)
    trainer.policy.model.double()
    samples = random_batch().samples
    expected_loss, expected = plain_gradient(trainer.policy.model, trainer.objectives[0].algorithm, samples, 0.9)
    loss, got, _ = gradient(trainer, Batch(version=0, samples=samples), old="rollout", share=share)
    assert loss == pytest.approx(expected_loss, rel=tolerance)
    assert (got - expected).norm() <= tolerance * expected.norm()


def test_checkpointing_turns_no_dropout_on(tmp_path):
    config = OPTConfig(**SMALL, ffn_dim=96, word_embed_proj_dim=64, dropout=0.5)
    run = context(save_model(tmp_path, config))
    plain, recomputed = (
        gradient(learner(run, activation_checkpointing=checkpointing), random_batch(), old="rollout")[1]
        for checkpointing in (False, True)
    )
    torch.testing.assert_close(recomputed, plain)


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_k23_k24_micro_batching_does_not_change_the_gradient(exact, aggregation):
    norm = {"token_sum_norm": 8.0} if aggregation == "seq-mean-token-sum-norm" else {}
    trainer = learner(context(exact, aggregation=aggregation, entropy_coef=0.01, **norm))
    trainer.policy.model.double()
    batch = random_batch(groups=3, size=3)
    results = {}
    for budget, share in ((10_000, True), (80, True), (60, False), (27, False)):
        loss, grad, part = gradient(trainer, batch, old="rollout", budget=budget, share=share)
        results[len(part.micro_batches)] = loss, grad
    assert sorted(results) == [1, 2, 3, 7]
    one_loss, one = results[1]
    for loss, grad in results.values():
        assert loss == pytest.approx(one_loss, rel=1e-9)
        assert (grad - one).norm() <= 1e-9 * one.norm()
        assert grad.norm().item() == pytest.approx(one.norm().item(), rel=1e-9)


def test_skipping_samples_without_advantage_does_not_change_the_gradient(tiny):
    trainer = learner(context(tiny))
    trainer.policy.model.double()
    samples = list(random_batch().samples)
    samples[1] = dataclasses.replace(samples[1], advantages=np.zeros_like(samples[1].advantages))
    batch = Batch(version=0, samples=samples)
    skipped_loss, skipped, fewer = gradient(trainer, batch, old="rollout", skip=True)
    loss, grad, all_of_them = gradient(trainer, batch, old="rollout", skip=False)
    assert len(fewer.micro_batches[0].token_counts) == 5
    assert len(all_of_them.micro_batches[0].token_counts) == 6
    assert skipped_loss == pytest.approx(loss, rel=1e-12)
    assert (skipped - grad).norm() <= 1e-9 * grad.norm()


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30])
def test_k16_k18_k20_values_at_masked_positions_reach_nothing(tiny, poison):
    def poisoned(s):
        off = s.loss_mask == 0
        return dataclasses.replace(
            s,
            logprobs=np.where(off, np.float32(poison), s.logprobs),
            advantages=np.where(off, np.float32(poison), s.advantages),
        )

    clean, dirty = random_batch(), random_batch()
    dirty = Batch(version=0, samples=[poisoned(s) for s in dirty.samples])
    results = []
    for batch in (clean, dirty):
        trainer = learner(context(tiny, kl_coef=0.1, old_logprobs="rollout"))
        results.append((without_seconds(trainer.step(batch)), weights(trainer)))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(results[0][1][name], results[1][1][name]) for name in results[0][1])


def test_k16_environment_tokens_have_no_gradient(tiny):
    trainer = learner(context(tiny))
    trainer.policy.model.double()
    one = sample([3, 4, 5, 6, 7, 8], [0, 0, 1, 0, 0, 1])
    _, grad, _ = gradient(trainer, Batch(version=0, samples=[one]))
    trainer.optimizer.zero_grad()
    ids = torch.tensor([[3, 4, 5, 6, 7, 8]])
    log_p = trainer.policy.model(input_ids=ids).logits[0].log_softmax(-1)
    (-(log_p[1, 5] + log_p[4, 8]) / 2).backward()
    expected = flat(trainer.policy.model)
    assert (grad - expected).norm() <= 1e-9 * expected.norm()


def test_k21_each_segment_is_trained_with_its_own_mask(tiny):
    trainer = learner(context(tiny, old_logprobs="recompute"))
    first = sample([3, 4, 5, 6, 7], [0, 0, 1, 1, 0])
    second = dataclasses.replace(sample([3, 4, 5, 6, 7, 8, 9], [0, 0, 0, 0, 0, 1, 1]), segment=1)
    metrics = trainer.step(Batch(version=0, samples=[first, second]))
    assert metrics["trained_tokens"] == 4
    assert metrics["loss"] == pytest.approx(-1.0)
    (batch,) = plan([first, second], budget=100, share_prefix=True, skip_flat=True).micro_batches
    assert sorted(batch.targets.tolist()) == [5, 6, 8, 9]
    assert batch.advantages.tolist() == [1, 1, 1, 1]


def test_k22_each_sampled_token_is_in_the_loss_once(tiny):
    trainer = learner(context(tiny))
    batch = random_batch()
    assert trainer.step(batch)["trained_tokens"] == batch.trained_tokens
    part = plan(batch.samples, budget=20, share_prefix=True, skip_flat=False)
    assert sum(len(b.targets) for b in part.micro_batches) == batch.trained_tokens
