"""How much the log-probs hold in memory, and what is said where they cannot help it."""

import dataclasses
import logging

import pytest
import torch
from algorithm_cases import build
from learner_cases import Largest, context, learner, qwen3, sample, save_model
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AutoModelForCausalLM

from relax_gym_trainers.functional import reverse_kl
from relax_gym_trainers.torch_learner import logprobs
from relax_gym_trainers.torch_learner.distillation import Distiller
from relax_gym_trainers.torch_learner.divergence import FullVocabulary, compare_all
from relax_gym_trainers.torch_learner.policy import Policy
from relax_gym_trainers.torch_learner.teacher import FrozenTeacher
from relax_gym_trainers.torch_learner.update import Part, Tally, accumulate_policy_gradient, plan

VOCABULARY, TOKENS, CHUNK = 2000, 128, 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose logits are far larger than anything else in it."""
    config = qwen3(vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, head_dim=4)
    return save_model(tmp_path_factory.mktemp("models"), config)


@pytest.fixture
def policy(folder):
    return learner(context(folder), logprob_chunk=CHUNK).policy


@pytest.fixture
def batch():
    ids = [index % 7 for index in range(TOKENS + 1)]
    (batch,) = plan([sample(ids, [0] + [1] * TOKENS)], budget=10_000, share_prefix=True, skip_flat=False).micro_batches
    return batch


def score(policy, batch):
    values, entropy = policy.score(batch)
    (values.sum() + entropy.sum()).backward()
    return values


def distil(policy, batch):
    features, targets = policy.features(batch), torch.from_numpy(batch.targets)
    teacher = FullVocabulary(teacher=policy, features=features.detach(), targets=targets, form=reverse_kl)
    values, _ = compare_all(policy, features, teacher)
    values.sum().backward()
    return values


def teach(policy, batch):
    return FrozenTeacher(policy, budget=10_000).score(batch.members, temperature=1.0, top_k=2)[0].logprobs


OPD = build("opd", teacher="t")


def taught_by_itself(policy):
    return Distiller(OPD.distillation, {"t": FrozenTeacher(policy, budget=10_000)}, temperature=1.0)


def distil_two(policy, batch):
    """As `opd` without a reward: the log-probs have no gradient, and are there until the next ones are."""
    for _ in range(2):
        logprobs, entropy, values, _ = taught_by_itself(policy).score(policy, batch)
        values.sum().backward()
    assert logprobs.requires_grad
    assert entropy.requires_grad
    return values


WAYS = {"score": score, "distil": distil, "distil_two": distil_two, "teach": teach}


@pytest.mark.parametrize("way", WAYS)
def test_no_tensor_is_as_large_as_the_logits_of_the_batch(policy, batch, way):
    with Largest() as largest:
        assert len(WAYS[way](policy, batch)) == TOKENS
    assert CHUNK * VOCABULARY <= largest.elements < TOKENS * VOCABULARY / 4


@pytest.mark.parametrize("way", WAYS)
def test_no_tensor_is_kept_from_each_block(policy, batch, way, monkeypatch):
    held = []
    for rows in (CHUNK, 1):
        monkeypatch.setattr(logprobs, "BLOCK_ELEMENTS", rows * VOCABULARY)
        with Largest() as largest:
            WAYS[way](policy, batch)
        held.append(largest.held)
    assert held[1] <= held[0] + 10 < held[0] + TOKENS / 2


@pytest.mark.parametrize(("way", "chunks"), [("score", 1), ("distil", 2), ("distil_two", 2), ("teach", 1)])
def test_the_logits_of_a_chunk_go_before_those_of_the_next_come(policy, batch, way, chunks, monkeypatch):
    monkeypatch.setattr(logprobs, "BLOCK_ELEMENTS", VOCABULARY)
    policy.model.requires_grad_(False)
    features = policy.features(batch).requires_grad_()
    policy.features = lambda batch: features
    with Largest() as largest:
        WAYS[way](policy, batch)
    one, weight = CHUNK * VOCABULARY * 4, policy.head.weight.nbytes
    assert chunks * one < largest.bytes - weight < (chunks + 0.5) * one


def test_nothing_of_a_micro_batch_outlives_its_gradient(policy, batch):
    flat = dataclasses.replace(batch, advantages=0 * batch.advantages)
    features, alive, before = policy.features, WeakTensorKeyDictionary(), []

    def watched(batch):
        out = features(batch)
        if out.requires_grad:
            before.append(len(alive))
            alive[out] = True
        return out

    policy.features = watched
    part = Part(micro_batches=[flat] * 3, total_tokens=3 * TOKENS, total_samples=3, padded_tokens=0, saved_tokens=0)
    settings = {"old": None, "reference": None, "tally": Tally(), "first": True, "step": 1}
    accumulate_policy_gradient(policy, OPD, part, **settings, distiller=taught_by_itself(policy))
    assert before == [0, 0, 0]


class DoubledHead(torch.nn.Linear):
    def forward(self, hidden):
        return 2 * super().forward(hidden)


def double_outside(module, inputs, output):
    output.logits = 2 * output.logits
    return output


@pytest.mark.parametrize(
    ("case", "what"),
    [
        ("plain", None),
        ("subclass", "an output layer that is no plain torch.nn.Linear"),
        ("outside", "logits that are not W h + b"),
    ],
)
def test_a_head_that_is_not_understood_is_said_once(folder, batch, case, what, caplog):
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    if case == "subclass":
        head = DoubledHead(16, VOCABULARY, bias=False)
        head.weight = model.lm_head.weight
        model.lm_head = head
    if case == "outside":
        model.register_forward_hook(double_outside)
    with caplog.at_level(logging.WARNING, "relax_gym"):
        policy = Policy(model, temperature=1.0, dtype=torch.float32, chunk=CHUNK, share_prefix=True)
        values = policy.score(batch)[0]
    expected = what and (
        f"Qwen3ForCausalLM has {what}: all logits of a micro-batch exist at once, several times over, instead of those "
        f"of {CHUNK} tokens; lower learner.micro_batch_tokens if memory runs out"
    )
    assert [record.message for record in caplog.records] == ([expected] if expected else [])
    logits = model(torch.from_numpy(batch.ids)).logits[0]
    torch.testing.assert_close(values, logits.log_softmax(-1)[torch.arange(TOKENS), batch.targets], rtol=0, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_are_compiled_on_a_gpu_and_give_what_they_do_on_a_cpu(dtype, temperature, caplog):
    raw, targets = 3 * torch.randn(33, VOCABULARY).to(dtype), torch.arange(40, 73)
    head = logprobs.Head(
        weight=raw, bias=None, scale=1.0, softcap=None, temperature=temperature, never=torch.tensor([5, 7])
    )
    grads = torch.randn(2, 33)
    found = {}
    for device in ("cpu", "cuda"):
        scores = logprobs.score_block(raw.to(device), head, targets.to(device))
        _, entropy, normaliser = logprobs.combine(*scores)
        values = [x.to(device) for x in (targets, entropy, normaliser, grads[0], grads[1], grads[0])]
        block = raw.to(device, copy=True)
        logprobs.grad_block(block, head, *values)
        found[device] = [x.cpu() for x in (*scores, block)]
    assert "cannot be compiled" not in caplog.text
    for got, wanted in zip(found["cuda"], found["cpu"], strict=True):
        precise = torch.finfo(got.dtype).eps < 1e-5
        torch.testing.assert_close(got, wanted, **({"rtol": 1e-5, "atol": 1e-5} if precise else {}))
