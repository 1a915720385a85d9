"""The Megatron learner takes the steps of the torch learner, however it is laid out."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from algorithm_cases import NAMES, NEEDED
from learner_cases import learner, random_batch, weights
from megatron_learner_kit import (
    Case,
    Expected,
    Folders,
    Outcome,
    batches,
    by_megatron,
    gap,
    mixed,
    on_ranks,
    rank_learner,
)

from relax_gym.errors import TrainingError
from relax_gym.types import Batch, TrainingSample
from relax_gym_trainers.megatron_learner.parallel import Layout
from relax_gym_trainers.megatron_learner.rank_service import Place

pytest_plugins = ["megatron_fixtures"]
pytestmark = pytest.mark.usefixtures("one_thread")
TOLERANCE = 5e-5  # what is reached is about 5e-6, and 2e-5 for a loss of nearly 0


def assert_same(found: Outcome, expected: Outcome, tolerance: float = TOLERANCE) -> None:
    assert {name: value for name, value in gap(found, expected).items() if value > tolerance} == {}


# Layouts --------------------------------------------------------------------------------------------------------------

MIXTURE = ({"loss_weight": 0.5}, {"algorithm": {"name": "sapo"}, "loss_weight": 2.0})
UPDATES = {"updates_per_step": 2}


ALL_AT_ONCE = Case(
    algorithm={"kl_coef": 0.1, "entropy_coef": 0.01},
    envs=MIXTURE,
    options={**UPDATES, "weight_decay": 0.1},
    steps=[mixed(batch) for batch in batches(2, groups=4, size=2)],
    temperature=0.8,
)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("dense", Layout(tp=2)),
        ("deep", Layout(pp=2, vpp=2)),
        ("dense", Layout(dp=2, cp=2)),
        ("experts", Layout(tp=2, ep=2, etp=1)),
    ],
    ids=str,
)
def test_steps_are_those_of_the_torch_learner(expected: Expected, folders: Folders, model: str, layout: Layout) -> None:
    (found,) = by_megatron(layout, folders[model], [ALL_AT_ONCE])
    assert_same(found, expected(model, ALL_AT_ONCE))


FIVE = Case(steps=batches(5))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("dense", Layout()),
        ("dense", Layout(tp=2, sequence_parallel=False)),
        ("dense", Layout(tp=2)),
        ("dense", Layout(pp=2)),
        ("deep", Layout(pp=2, vpp=2)),
        ("dense", Layout(cp=2)),
        ("dense", Layout(dp=2)),
        ("dense", Layout(tp=2, pp=2)),
        ("dense", Layout(dp=2, cp=2)),
        ("experts", Layout()),
        ("experts", Layout(dp=2, ep=2)),
        ("experts", Layout(cp=2, ep=2)),
        ("experts", Layout(tp=2)),
        ("experts", Layout(tp=2, etp=1)),
        ("experts", Layout(dp=2, etp=2)),
        ("experts", Layout(tp=2, ep=2, etp=1)),
        ("experts", Layout(tp=2, dp=2, ep=2, etp=2)),
        ("experts", Layout(pp=2, dp=2, ep=2)),
        ("experts", Layout(tp=2, pp=2)),
    ],
    ids=str,
)
def test_k23_five_steps_are_those_of_the_torch_learner(
    expected: Expected, folders: Folders, model: str, layout: Layout
) -> None:
    (found,) = by_megatron(layout, folders[model], [FIVE])
    assert_same(found, expected(model, FIVE))
    assert found.metrics[0]["loss"] == pytest.approx(expected(model, FIVE).metrics[0]["loss"], abs=1e-6)


# Algorithms -----------------------------------------------------------------------------------------------------------

MASKED = {"correction_level": "sequence", "sequence_mask_delta": 0.05, "old_logprobs": "recompute"}
K1, K3 = {"kl_reward_coef": 0.1}, {"kl_reward_coef": 0.1, "kl_reward_estimator": "k3", "old_logprobs": "recompute"}
SCHEDULE = {"schedule": "cosine", "warmup_steps": 1, "grad_clip": 0.05}
ALGORITHMS = {
    **{name: Case(algorithm={"name": name, **NEEDED.get(name, {})}, options=UPDATES) for name in NAMES},
    "grpo again and again": Case(algorithm={"dual_clip": 3.0}, options={**UPDATES, "epochs": 2}),
    "kl loss": Case(algorithm={"kl_coef": 0.1, "kl_estimator": "k2"}, steps=batches(2), temperature=0.7, never=(0, 1)),
    "kl reward": Case(algorithm=K3, steps=batches(2)),
    "kl reward, whitened": Case(algorithm={"name": "reinforce_pp", **K1}, steps=batches(2)),
    "tis": Case(algorithm={"correction": "tis", "old_logprobs": "recompute"}, options=UPDATES),
    "icepop": Case(algorithm={"correction": "icepop", **MASKED}, options=UPDATES),
    "a warm-up": Case(algorithm={"kl_coef": 0.1}, imitated=batches(2), steps=batches(2)),
    "a schedule": Case(options=SCHEDULE, steps=batches(2)),
    "two envs": Case(envs=MIXTURE, steps=[mixed(random_batch(groups=4, size=2))], options=UPDATES),
}


KINDS = [
    pytest.param("dense", Layout(tp=2, sequence_parallel=False), marks=pytest.mark.slow),
    pytest.param("dense", Layout(pp=2), marks=pytest.mark.slow),
    pytest.param("dense", Layout(cp=2), marks=pytest.mark.slow),
    pytest.param("experts", Layout(dp=2, ep=2), marks=pytest.mark.slow),
    pytest.param("experts", Layout(tp=2, ep=2, etp=1), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("model", "layout"), KINDS, ids=str)
def test_every_algorithm_does_the_same_on_every_kind_of_layout(
    expected: Expected, folders: Folders, model: str, layout: Layout
) -> None:
    for (name, case), found in zip(
        ALGORITHMS.items(), by_megatron(layout, folders[model], list(ALGORITHMS.values())), strict=True
    ):
        apart = {key: value for key, value in gap(found, expected(model, case)).items() if value > TOLERANCE}
        assert apart == {}, name


# Micro-batches --------------------------------------------------------------------------------------------------------


def budgets(*each: int) -> list[Case]:
    return [Case(options={"micro_batch_tokens": budget, **UPDATES}) for budget in each]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(dp=2), Layout(cp=2)], ids=str)
def test_k24_the_gradient_is_the_same_however_many_micro_batches_there_are(
    expected: Expected, folders: Folders, layout: Layout
) -> None:
    """With a budget of 1 each sample is alone, which is what packing may not differ from."""
    for found in by_megatron(layout, folders["dense"], budgets(1, 24, 64, 4096)):
        assert_same(found, expected("dense", ALGORITHMS["grpo"]))


def without(batch: Batch, *, keep: int) -> Batch:
    """The first `keep` samples have advantages, the others none."""
    samples = [dataclasses.replace(s, advantages=s.advantages * (i < keep)) for i, s in enumerate(batch.samples)]
    return dataclasses.replace(batch, samples=samples)


def first(batch: Batch, count: int) -> Batch:
    return dataclasses.replace(batch, samples=batch.samples[:count])


FEW = {
    "one sample": Case(algorithm={"kl_coef": 0.1}, steps=[first(random_batch(), 1)]),
    "one sample, kl reward": Case(algorithm=K3, steps=[first(random_batch(), 1)]),
    "one sample with an advantage": Case(steps=[without(random_batch(), keep=1)]),
    "three samples": Case(steps=[first(random_batch(), 3)], imitated=[first(random_batch(1), 1)]),
    "no advantage": Case(steps=[without(random_batch(), keep=0), *batches(1)]),
    "no sample": Case(steps=[first(random_batch(), 0)]),
    "all of them, whitened": ALGORITHMS["kl reward, whitened"],
}


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("dense", Layout(dp=2)),
        pytest.param("dense", Layout(pp=2, dp=2), marks=pytest.mark.slow),
        pytest.param("experts", Layout(dp=2, ep=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_k25_ranks_with_few_samples_or_none_do_as_one_rank_does(
    expected: Expected, folders: Folders, model: str, layout: Layout
) -> None:
    for (name, case), found in zip(FEW.items(), by_megatron(layout, folders[model], list(FEW.values())), strict=True):
        apart = {key: value for key, value in gap(found, expected(model, case)).items() if value > TOLERANCE}
        assert apart == {}, name


# What may not matter --------------------------------------------------------------------------------------------------

MEMORY: list[dict[str, Any]] = [{"distributed_optimizer": False}, {"recompute": "selective"}, {"recompute": "full"}]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layout"), [("dense", Layout(dp=2)), ("deep", Layout(pp=2, vpp=2))], ids=str)
def test_options_that_trade_memory_for_time_change_no_step(
    expected: Expected, folders: Folders, model: str, layout: Layout
) -> None:
    cases = [Case(options={**UPDATES, **options}) for options in MEMORY]
    for found in by_megatron(layout, folders[model], cases):
        assert_same(found, expected(model, ALGORITHMS["grpo"]))


def poisoned(batch: Batch, poison: float) -> Batch:
    """Log-probs and advantages of tokens that the policy did not sample are `poison`."""

    def spoilt(sample: TrainingSample) -> TrainingSample:
        trained = sample.loss_mask == 1
        arrays = {name: np.where(trained, getattr(sample, name), poison) for name in ("logprobs", "advantages")}
        return dataclasses.replace(sample, **{name: array.astype(np.float32) for name, array in arrays.items()})

    return dataclasses.replace(batch, samples=[spoilt(sample) for sample in batch.samples])


@pytest.mark.slow
def test_k16_k18_k20_values_at_masked_positions_reach_nothing(expected: Expected, folders: Folders) -> None:
    clean = [ALGORITHMS["kl reward, whitened"], ALGORITHMS["icepop"]]
    cases = [
        dataclasses.replace(case, steps=[poisoned(batch, poison) for batch in case.steps])
        for case, poison in zip(clean, (np.nan, np.inf), strict=True)
    ]
    for case, found in zip(clean, by_megatron(Layout(cp=2), folders["dense"], cases), strict=True):
        assert_same(found, expected("dense", case))


# What is not finite ---------------------------------------------------------------------------------------------------

TWO = Case(algorithm={"name": "sapo"}, steps=batches(2))  # which gives every token a gradient


def with_advantage(batch: Batch, advantage: float) -> Batch:
    """One trained token of one sample has this advantage."""
    sample = batch.samples[-1]
    advantages = sample.advantages.copy()
    advantages[sample.loss_mask.argmax()] = advantage
    return dataclasses.replace(batch, samples=[*batch.samples[:-1], dataclasses.replace(sample, advantages=advantages)])


def refusals(layout: Layout, place: Place, folder: Path) -> list[tuple[list[str], Outcome]]:
    """What is said of two broken batches between two steps, and these; with either optimizer."""
    found = []
    for number, distributed in enumerate((False, True)):
        case = dataclasses.replace(TWO, options={"distributed_optimizer": distributed})
        trainer, said = rank_learner(layout, place, number, folder, case), []
        metrics = [trainer.step(case.steps[0])]
        for advantage in (np.inf, 1e30):
            with pytest.raises(TrainingError) as error:
                trainer.step(with_advantage(case.steps[1], advantage))
            said.append(str(error.value))
        metrics.append(trainer.step(case.steps[1]))
        found.append((said, Outcome(metrics, weights(trainer))))
        trainer.close()
    return found


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("dense", Layout(dp=2)),
        pytest.param("dense", Layout(tp=2, pp=2), marks=pytest.mark.slow),
        pytest.param("experts", Layout(tp=2, ep=2, etp=1), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_what_is_not_finite_on_one_rank_is_refused_by_all_and_changes_nothing(
    expected: Expected, folders: Folders, model: str, layout: Layout
) -> None:
    for rank in on_ranks(layout, refusals, folders[model]):
        for (loss, norm), found in rank:
            assert loss.startswith("the loss of step 2 is -inf; the weights are as they were")
            assert norm.startswith("the gradient norm of step 2 is inf; the weights are as they were")
            assert_same(found, expected(model, TWO))


# bfloat16 -------------------------------------------------------------------------------------------------------------

# With a smaller eps the rounding of gradients near 0 decides on whole steps, and losses differ by processor.
SMALL_STEPS = Case(options={"dtype": "bfloat16", "eps": 1e-4, "micro_batch_tokens": 4096}, steps=[])
NORM = "model.norm.weight"


def small_steps(layout: Layout, place: Place, folder: Path) -> dict[str, Any]:
    """What is published after one step of 5e-4 and after twelve, and whether it is the float32 copies rounded."""
    trainer = rank_learner(layout, place, 0, folder, SMALL_STEPS)
    parameters = [parameter for chunk in trainer.backend.chunks for parameter in chunk.parameters()]
    published, metrics = [weights(trainer)], []
    for count in (1, 11):
        metrics += [trainer.imitate(random_batch(), lr=5e-4) for _ in range(count)]
        published.append(weights(trainer))
    masters = [parameter.main_param for parameter in parameters]
    pairs = zip(masters, parameters, strict=True)
    trainer.close()
    return {
        "published": published,
        "losses": [step["loss"] for step in metrics],
        "masters": {master.dtype for master in masters},
        "rounded": all(torch.equal(one.detach().flatten().bfloat16(), two.detach().flatten()) for one, two in pairs),
    }


def test_bfloat16_loses_no_small_update(folders: Folders) -> None:
    """The spacing of bfloat16 below 1 is 0.004: what one step of 5e-4 does to a norm's weights shows after several."""
    found = on_ranks(Layout(tp=2), small_steps, folders["dense"])[0]
    start, one, twelve = found["published"]
    assert {tensor.dtype for tensor in twelve.values()} == {torch.bfloat16}
    assert found["masters"] == {torch.float32}
    assert found["rounded"]
    assert torch.equal(one[NORM], start[NORM])
    assert (twelve[NORM] != start[NORM]).float().mean() > 0.5
    options = {**SMALL_STEPS.options, "dtype": "float32"}
    reference = learner(SMALL_STEPS.context(folders["dense"]), **options)
    losses = [reference.imitate(random_batch(), lr=5e-4)["loss"] for _ in range(12)]
    assert found["losses"] == pytest.approx(losses, rel=0.01)
    assert found["losses"][0] - found["losses"][-1] == pytest.approx(losses[0] - losses[-1], rel=0.1)
    for name, tensor in reference.weights():
        assert (twelve[name].float() - tensor).abs().max() < 0.005 * max(1.0, tensor.abs().max().item()), name
