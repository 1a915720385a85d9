"""The torch learner's life: steps, imitation, weights, checkpoints, options."""

import dataclasses
import math

import pytest
import torch
from learner_cases import (
    context,
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
    AutoModelForCausalLM,
)

from relax_gym.build import build_learner
from relax_gym.errors import ConfigError, ModelError, RunFolderError, TrainingError
from relax_gym.types import Batch
from relax_gym_trainers.policy_learner import split_by_group
from relax_gym_trainers.torch_learner.optimizer import learning_rate
from relax_gym_trainers.torch_learner.options import TorchLearnerOptions


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("models") / "qwen3", qwen3())


SAMPLED = r"the sampler reported -inf as log-prob of a token that it sampled, in segment 0 of episode '7-1' of step 1;"


# ---- steps ---------------------------------------------------------------------------------------


def test_a_step_moves_the_weights_towards_the_advantage(tiny):
    trainer = learner(context(tiny, old_logprobs="recompute"), lr=3e-3)
    samples = [
        sample([3, 4, 5, 6], [0, 0, 1, 1], advantage=1.0, episode="good"),
        sample([3, 4, 9, 2], [0, 0, 1, 1], advantage=-1.0, episode="bad"),
    ]
    with torch.no_grad():
        before = [logprobs.sum().item() for logprobs, _ in plain_logprobs(trainer.policy.model, samples)]
    metrics = trainer.step(Batch(version=0, samples=samples))
    with torch.no_grad():
        after = [logprobs.sum().item() for logprobs, _ in plain_logprobs(trainer.policy.model, samples)]
    assert after[0] > before[0]
    assert after[1] < before[1]
    assert trainer.version == 1
    assert metrics["loss"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-6)
    assert (metrics["updates"], metrics["clip_fraction"]) == (1, 0)
    assert (metrics["trained_tokens"], metrics["padded_tokens"], metrics["prefix_saved_tokens"]) == (4, 4, 2)


def test_metrics_of_a_step(tiny):
    trainer = learner(context(tiny, kl_coef=0.1))
    metrics = trainer.step(random_batch())
    with_gradient = {"entropy", "ratio_mean", "clip_fraction", "kl"}
    gap = {f"logprob_diff_{name}" for name in ("mean", "max", "k3", "clipped", "tokens")}
    counts = {"updates", "trained_tokens", "padded_tokens", "prefix_saved_tokens", "seconds"}
    assert set(metrics) == {"loss", "grad_norm", "lr"} | with_gradient | gap | counts
    assert all(math.isfinite(value) for value in metrics.values())
    assert 0 < metrics["entropy"] < math.log(61)
    assert metrics["logprob_diff_max"] >= metrics["logprob_diff_mean"] > 0
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-10)  # the reference is scored group by group


def test_clip_fraction_counts_tokens_without_gradient(tiny):
    trainer = learner(context(tiny))
    samples = [
        sample([3, 4, 5, 6], [0, 0, 1, 1], advantage=1.0, logprobs=[0, 0, -20, -20]),
        sample([3, 4, 7, 8], [0, 0, 1, 1], advantage=-1.0, logprobs=[0, 0, -20, -20]),
    ]
    batch = Batch(version=0, samples=samples)
    assert trainer.step(batch)["clip_fraction"] == 0.5


@pytest.mark.parametrize("empty", [[], [sample([3, 4, 5], [0, 0, 0])], [sample([3, 4, 5], [0, 0, 1], advantage=0.0)]])
def test_k29_a_batch_without_signal_touches_no_weight(tiny, empty):
    trainer = learner(context(tiny), weight_decay=0.1)
    trainer.step(random_batch())
    before = weights(trainer)
    metrics = trainer.step(Batch(version=1, samples=empty))
    assert metrics["trained_tokens"] == sum(s.trained_tokens for s in empty)
    assert (metrics["loss"], metrics["grad_norm"], metrics["updates"], trainer.version) == (0.0, 0.0, 0.0, 2)
    assert all(math.isfinite(value) for value in metrics.values())
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.weights())


@pytest.mark.parametrize(
    ("algorithm", "changes", "message"),
    [
        ({}, {"advantage": math.inf}, r"the loss of step 1 is (-inf|nan); the weights are as they were"),
        ({}, {"logprobs": [0, 0, -math.inf]}, SAMPLED),
        ({"kl_reward_coef": 0.1}, {"logprobs": [0, 0, -math.inf]}, SAMPLED),
    ],
)
def test_numbers_that_are_not_finite_end_training_and_leave_the_weights(tiny, algorithm, changes, message):
    trainer = learner(context(tiny, **algorithm))
    before = weights(trainer)
    broken = sample([3, 4, 5], [0, 0, 1], **{"advantage": -1.0, "episode": "7-1", **changes})
    with pytest.raises(TrainingError, match=message):
        trainer.step(Batch(version=0, samples=[*random_batch().samples, broken]))
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.weights())
    trainer.step(random_batch())
    assert all(tensor.isfinite().all() for _, tensor in trainer.weights())


def test_a_non_finite_gradient_ends_training_and_leaves_the_weights(tiny):
    trainer = learner(context(tiny))
    before = weights(trainer)
    trainer.parameters[0].register_hook(lambda grad: grad * math.nan)
    with pytest.raises(TrainingError, match="gradient norm of step 1 is nan"):
        trainer.step(random_batch())
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.weights())
    assert not trainer.optimizer.state


def test_recomputed_old_logprobs_are_those_before_the_first_of_several_updates(tiny):
    trainer = learner(context(tiny, old_logprobs="recompute"), epochs=2, lr=1e-3)
    metrics = trainer.step(random_batch())
    assert metrics["updates"] == 2
    assert metrics["ratio_mean"] != 1.0
    first = learner(context(tiny, old_logprobs="recompute"), epochs=1, lr=1e-3)
    assert first.step(random_batch())["ratio_mean"] == 1.0


def test_updates_per_step_cut_the_batch_by_groups(tiny):
    samples = random_batch(groups=5, size=2).samples
    names = [[s.group_id for s in part] for part in split_by_group(samples, 2)]
    assert names == [["g0", "g0", "g1", "g1", "g2", "g2"], ["g3", "g3", "g4", "g4"]]
    trainer = learner(context(tiny, groups=4), updates_per_step=2)
    metrics = trainer.step(random_batch(groups=4))
    assert (metrics["updates"], trainer.version) == (2, 1)
    assert trainer.optimizer.state[trainer.parameters[0]]["step"].item() == 2


def test_the_kl_loss_pulls_back_to_the_reference(tiny):
    trainer = learner(context(tiny, kl_coef=10.0), lr=1e-3)
    reference = weights(trainer)
    kls = [trainer.step(random_batch())["kl"] for _ in range(8)]
    free = learner(context(tiny), lr=1e-3)
    for _ in range(8):
        free.step(random_batch())

    def distance(one):
        return sum((tensor - reference[name]).square().sum().item() for name, tensor in one.weights())

    assert kls[0] == pytest.approx(0.0, abs=1e-10)
    assert kls[-1] > 0.0
    assert distance(trainer) < distance(free)


def test_two_identical_runs_are_bit_equal(tiny):
    runs = []
    for _ in range(2):
        trainer = learner(context(tiny, kl_coef=0.05, entropy_coef=0.01), dtype="bfloat16", micro_batch_tokens=40)
        metrics = [without_seconds(trainer.step(random_batch(seed))) for seed in range(3)]
        runs.append((metrics, weights(trainer)))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(tensor, runs[1][1][name]) for name, tensor in runs[0][1].items())


def test_bfloat16_autocast_keeps_float32_weights_and_is_close(tiny):
    trainer = learner(context(tiny), dtype="bfloat16")
    batch = random_batch()
    loss, low, _ = gradient(trainer, batch, old="rollout", budget=30)
    exact_loss, exact, _ = gradient(learner(context(tiny)), batch, old="rollout")
    assert loss == pytest.approx(exact_loss, abs=0.05)
    assert torch.nn.functional.cosine_similarity(low, exact, dim=0) > 0.99
    assert {tensor.dtype for _, tensor in trainer.weights()} == {torch.float32}


def test_bfloat16_checkpointing_recomputes_the_same_numbers(tiny):
    grads = []
    for checkpointing in (False, True):
        trainer = learner(context(tiny), dtype="bfloat16", activation_checkpointing=checkpointing)
        grads.append(gradient(trainer, random_batch(), old="rollout", budget=30)[1])
    assert torch.equal(*grads)


# ---- imitation -----------------------------------------------------------------------------------


def test_imitation_minimises_the_likelihood_loss_without_moving_the_version(tiny):
    trainer = learner(context(tiny))
    batch = random_batch()
    with torch.no_grad():
        expected = -torch.cat([lp for lp, _ in plain_logprobs(trainer.policy.model, batch.samples)]).mean().item()
    losses = [trainer.imitate(batch, lr=3e-3)["loss"] for _ in range(20)]
    assert losses[0] == pytest.approx(expected, rel=1e-5)
    assert losses[-1] < 0.5 * losses[0]
    assert trainer.version == 0
    assert not trainer.optimizer.state


def test_the_first_step_drops_the_imitation_optimizer_and_takes_the_reference(tiny):
    trainer = learner(context(tiny, kl_coef=0.1))
    trainer.imitate(random_batch(), lr=1e-2)
    metrics = trainer.step(random_batch())
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-10)  # the reference is scored group by group
    assert trainer._imitation is None


def test_imitation_of_nothing_is_no_step(tiny):
    trainer = learner(context(tiny))
    before = weights(trainer)
    assert trainer.imitate(Batch(version=0, samples=[]), lr=1.0)["loss"] == 0.0
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.weights())


# ---- weights, export, resume ---------------------------------------------------------------------


def test_weights_are_those_of_the_model_tied_ones_once(tiny):
    plain = AutoModelForCausalLM.from_pretrained(tiny)
    given = dict(learner(context(tiny)).weights())
    assert set(given) == {name for name, _ in plain.named_parameters()}
    assert "lm_head.weight" not in given
    assert all(torch.equal(given[name], tensor) for name, tensor in plain.named_parameters())


RESUME = {
    "plain": ({}, {}),
    "bf16-cosine-kl": ({"kl_coef": 0.1}, {"dtype": "bfloat16", "schedule": "cosine", "warmup_steps": 2}),
    "lora": ({}, {"lora": {"rank": 4, "alpha": 8.0, "dropout": 0.1}}),
    "freeze": ({}, {"freeze": ("*embed*", "model.layers.0.*"), "weight_decay": 0.1}),
}


@pytest.mark.parametrize("case", RESUME)
def test_k113_four_steps_equal_two_and_resume_and_two(tiny, tmp_path, case):
    algorithm, options = RESUME[case]
    run = context(tiny, **algorithm)

    def train(trainer, seeds):
        return [without_seconds(trainer.step(random_batch(seed, version=trainer.version))) for seed in seeds]

    torch.manual_seed(5)
    whole = learner(run, **options)
    whole.imitate(random_batch(9), lr=1e-3)
    expected = train(whole, range(4))
    torch.manual_seed(5)
    half = learner(run, **options)
    half.imitate(random_batch(9), lr=1e-3)
    got = train(half, range(2))
    half.export(tmp_path)
    half.save_state(tmp_path)
    torch.manual_seed(77)
    resumed = learner(run, **options)
    resumed.load(tmp_path)
    assert resumed.version == 2
    got += train(resumed, range(2, 4))
    assert got == expected
    assert all(torch.equal(tensor, weights(resumed)[name]) for name, tensor in whole.weights())


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_the_export_loads_in_transformers_and_is_what_weights_gives(tiny, tmp_path, lora):
    trainer = learner(context(tiny), lora=lora)
    trainer.step(random_batch())
    trainer.export(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    given = dict(trainer.weights())
    assert loaded.dtype == torch.float32
    assert set(given) == {name for name, _ in loaded.named_parameters()}
    assert all(torch.equal(given[name], tensor) for name, tensor in loaded.named_parameters())
    ids = torch.tensor([[3, 4, 5, 6]])
    torch.testing.assert_close(loaded(ids).logits, trainer.policy.model(ids).logits, rtol=1e-4, atol=1e-4)


def test_lora_trains_adapters_only(tiny):
    trainer = learner(context(tiny), lora={"rank": 4, "targets": ("q_proj", "v_proj")})
    before = weights(trainer)
    trainer.step(random_batch())
    after = weights(trainer)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {f"model.layers.{i}.self_attn.{p}_proj.weight" for i in (0, 1) for p in ("q", "v")}


def test_freeze_keeps_what_it_names(tiny):
    trainer = learner(context(tiny), freeze=("*embed*", "model.layers.0.*"))
    before = weights(trainer)
    trainer.step(random_batch())
    changed = {name for name, tensor in trainer.weights() if not torch.equal(before[name], tensor)}
    assert changed
    assert all(name.startswith(("model.layers.1.", "model.norm")) for name in changed)


def test_wrong_folders_are_refused(tiny, tmp_path):
    with pytest.raises(RunFolderError, match=r"holds no learner_state\.pt"):
        learner(context(tiny)).load(tmp_path)
    adapted = learner(context(tiny), lora={"rank": 2})
    adapted.save_state(tmp_path / "adapted")
    with pytest.raises(RunFolderError, match=r"was trained with learner\.lora"):
        learner(context(tiny)).load(tmp_path / "adapted")
    other = context(save_model(tmp_path / "other", qwen3(), seed=3))
    with pytest.raises(RunFolderError, match="adapters of another model"):
        learner(other, lora={"rank": 2}).load(tmp_path / "adapted")
    with pytest.raises(ModelError, match=r"nowhere holds no config\.json"):
        learner(dataclasses.replace(context(tiny), model_path=tmp_path / "nowhere"))


def test_a_broken_model_is_refused(tmp_path):
    folder = save_model(tmp_path, qwen3())
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.model.norm.weight.data.fill_(math.nan)
    model.save_pretrained(folder)
    with pytest.raises(ModelError, match="its weights are broken"):
        learner(context(folder))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"freeze": ("model.layer.*",)}, r"'model.layer.\*' matches no parameter"),
        ({"freeze": ("*",)}, "leaves no parameter to train"),
        ({"freeze": ("*embed*",), "lora": {"rank": 2}}, "exclude each other"),
        ({"lora": {"targets": ("nothing",)}}, "learner.lora.targets"),
        ({"device": "cuda:99"}, r"sees \d+ CUDA devices"),
        ({"device": "tpu9"}, "is no torch device"),
    ],
)
def test_options_that_cannot_work_are_refused(tiny, options, message):
    with pytest.raises(ConfigError, match=message):
        learner(context(tiny), **options)


@pytest.mark.parametrize(("key", "value", "off"), [("top_p", 0.9, "1.0"), ("top_k", 20, "0"), ("min_p", 0.05, "0.0")])
def test_sampling_from_less_than_the_full_distribution_is_warned_of(tiny, caplog, key, value, off):
    def build(rollout, algorithm):
        run = context(tiny, **algorithm)
        rollout = run.config.rollout.model_copy(update=rollout)
        build_learner(dataclasses.replace(run, config=run.config.model_copy(update={"rollout": rollout})))

    build({}, {})
    build({key: value}, {"name": "sft"})
    assert caplog.messages == []
    build({key: value}, {})
    (message,) = caplog.messages
    assert message.startswith(f"rollout.{key} = {value}: tokens are sampled from a truncated distribution")
    assert f"set it to {off} " in message


def test_close_is_idempotent(tiny):
    trainer = learner(context(tiny))
    trainer.step(random_batch())
    trainer.close()
    trainer.close()
    assert not trainer.optimizer.state


# ---- learning rate -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1, 1, 1, 1, 1, 1, 1]),
        ({"warmup_steps": 4}, [0.25, 0.5, 0.75, 1, 1, 1, 1]),
        ({"schedule": "linear", "warmup_steps": 2}, [0.5, 1, 1, 0.75, 0.5, 0.25, 0]),
        ({"schedule": "linear", "warmup_steps": 2, "min_lr_ratio": 0.5}, [0.5, 1, 1, 0.875, 0.75, 0.625, 0.5]),
        ({"schedule": "cosine", "warmup_steps": 2}, [0.5, 1, 1, 0.853553, 0.5, 0.146447, 0]),
    ],
)
def test_learning_rate(options, expected):
    got = [learning_rate(TorchLearnerOptions(lr=1.0, **options), step, 6) for step in range(7)]
    assert got == pytest.approx(expected, abs=1e-6)
