"""Megatron's routers take the sampler's experts: steps as the torch learner's with the same ones, however laid out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import save_model
from megatron_learner_kit import MODELS as KIT
from megatron_learner_kit import TINY, Case, batches, by_megatron, by_torch, gap, on_ranks, rank_learner
from numpy.typing import NDArray
from torch import Tensor
from transformers import MixtralConfig, PretrainedConfig

from relax_gym.errors import TrainingError
from relax_gym.types import Batch, TrainingSample
from relax_gym_trainers.megatron_learner.parallel import Layout
from relax_gym_trainers.megatron_learner.ranks import Place
from relax_gym_trainers.megatron_learner.replay import Chosen
from relax_gym_trainers.torch_learner.packing import UNROUTED

from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function  # isort: skip

pytestmark = pytest.mark.usefixtures("one_thread")
EXPERTS, TOP_K = 4, 2
PLAIN: dict[str, Any] = {"share_prefix": False}  # else a group's prompt has the experts of its first sample


def changed(config: PretrainedConfig, **options: Any) -> PretrainedConfig:
    return type(config)(**{**config.to_dict(), **options})


MODELS: dict[str, PretrainedConfig] = {
    "normed": KIT["experts"],
    "plain": changed(KIT["experts"], norm_topk_prob=False),
    "deep": changed(KIT["experts"], num_hidden_layers=4),
    "mixtral": MixtralConfig(**TINY, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K, sliding_window=None),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in made:
            made[name] = save_model(tmp_path_factory.mktemp(name), MODELS[name])
        return made[name]

    return find


def choice(one: TrainingSample, layers: int) -> NDArray[np.int32]:
    """Two different experts for each token and layer, which depend on token and position."""
    ids, places = one.token_ids[:-1, None], np.arange(len(one.token_ids) - 1)[:, None]
    first = (ids * 7 + places * 3 + np.arange(layers) * 5) % EXPERTS
    second = (first + 1 + (places + ids) % (EXPERTS - 1)) % EXPERTS
    return np.stack([first, second], -1).astype(np.int32)


def routed(batch: Batch, layers: int = 2, **changes: NDArray[np.int32] | None) -> Batch:
    """The batch with a `choice`, or what `changes` have for an episode."""
    samples = [
        dataclasses.replace(s, routed_experts=changes.get(s.episode_id, choice(s, layers))) for s in batch.samples
    ]
    return Batch(version=batch.version, samples=samples)


def steps(model: str, count: int = 3) -> list[Batch]:
    """One sample of each batch comes without experts."""
    return [routed(batch, MODELS[model].num_hidden_layers, g1e1=None) for batch in batches(count, groups=4)]


# ---- steps -----------------------------------------------------------------------------------------------------------

FULL = {"recompute": "full"}
LAYOUTS: list[tuple[str, Layout, dict[str, Any]]] = [
    ("mixtral", Layout(), {"recompute": "selective"}),
    ("normed", Layout(tp=2), {}),
    ("deep", Layout(pp=2, vpp=2), FULL),
    ("normed", Layout(cp=2), {}),
    ("plain", Layout(dp=2, ep=2), FULL),
]
MORE: list[tuple[str, Layout, dict[str, Any]]] = [
    ("normed", Layout(), {}),
    ("plain", Layout(), FULL),
    ("normed", Layout(pp=2), {}),
    ("plain", Layout(pp=2), FULL),
    ("normed", Layout(dp=2), {}),
    ("deep", Layout(pp=2, vpp=2), {}),
    ("mixtral", Layout(tp=2, ep=2, etp=1), FULL),
    ("normed", Layout(tp=2, cp=2), {"recompute": "selective"}),
    ("plain", Layout(tp=2, dp=2, ep=2, etp=2), {}),
    ("deep", Layout(tp=2, pp=2), FULL),
]


@pytest.mark.parametrize(
    ("model", "layout", "options"),
    [*LAYOUTS, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)],
    ids=lambda value: " ".join(value.values()) if isinstance(value, dict) else str(value) or "one",
)
def test_k41_three_steps_are_those_of_the_torch_learner_with_the_same_experts(folder, model, layout, options) -> None:
    case = Case(steps=steps(model))
    (ours,) = by_megatron(layout, folder(model), [dataclasses.replace(case, options=options)])
    theirs = by_torch(folder(model), dataclasses.replace(case, options=PLAIN))
    assert {name: error for name, error in gap(ours, theirs).items() if error > 1e-4} == {}


def test_groups_with_experts_and_without_are_scored_in_one_step(folder) -> None:
    lacking = {f"g1e{number}": None for number in range(3)}
    case = Case(algorithm={"kl_coef": 0.1}, steps=[routed(batch, **lacking) for batch in batches(2, groups=4)])
    (ours,) = by_megatron(Layout(dp=2), folder("normed"), [case])
    theirs = by_torch(folder("normed"), dataclasses.replace(case, options=PLAIN))
    assert {name: error for name, error in gap(ours, theirs).items() if error > 1e-4} == {}
    assert theirs.metrics[1]["kl"] > 0


def test_without_experts_steps_are_others(folder) -> None:
    replayed, own = by_megatron(
        Layout(), folder("normed"), [Case(steps=steps("normed", 1)), Case(steps=batches(1, groups=4))]
    )
    found = gap(replayed, own)
    assert min(found["loss"], found["grad_norm"], found["weights"]) > 1e-2


def test_references_and_warm_ups_are_replayed_as_the_torch_learner_does(folder) -> None:
    case = Case(algorithm={"kl_coef": 0.1}, imitated=steps("plain", 1), steps=steps("plain", 2))
    (ours,) = by_megatron(Layout(), folder("plain"), [case])
    theirs = by_torch(folder("plain"), dataclasses.replace(case, options=PLAIN))
    assert {name: error for name, error in gap(ours, theirs).items() if error > 1e-4} == {}


# ---- what is refused -------------------------------------------------------------------------------------------------


def _refusals(layout: Layout, place: Place, model: Path, given: list[Batch]) -> list[str]:
    """What each step says, of one learner; it goes on afterwards."""
    trainer = rank_learner(layout, place, 0, model, Case())
    said = []
    for batch in given:
        try:
            trainer.step(batch)
            said.append("")
        except TrainingError as error:
            said.append(str(error))
    trainer.close()
    return said


def test_wrong_experts_are_refused_on_every_rank(folder) -> None:
    (batch,) = batches(1)
    right = {one.episode_id: choice(one, 2) for one in batch.samples}
    twice, beyond, half, deep = (right["g0e1"].copy() for _ in range(4))
    twice[2, 1] = 3
    beyond[0, 0, 1] = EXPERTS
    half[0, 1, 0] = UNROUTED
    given = [routed(batch, g0e1=wrong) for wrong in (twice, beyond, half)]
    given += [routed(batch, layers=3), routed(batch, g0e1=np.repeat(deep, 2, axis=1)), routed(batch)]
    said = on_ranks(Layout(dp=2), _refusals, folder("normed"), given)
    assert said[0] == said[1]
    *wrong, shape, mixed, nothing = said[0]
    for one in wrong:
        assert one.startswith("the sampler gave some token experts that the model does not have, or one of them twice")
    assert shape == (
        "the sampler gave 2 experts in each of 3 layers; the model here has routers with top_k [2, 2]: sampler and "
        "learner must run the same mixture-of-experts model"
    )
    assert mixed == "routed experts have different [layers, top_k]: [(2, 2), (4, 2)]; use one sampler's"
    assert nothing == ""


# ---- one router ------------------------------------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "softmax of the chosen": {"use_pre_softmax": False},
    "softmax of all": {"use_pre_softmax": True},
    "scaled sigmoid": {"score_function": "sigmoid", "scaling_factor": 2.5},
    "biased sigmoid": {"score_function": "sigmoid", "expert_bias": torch.tensor([0.3, 0, -0.2, 0, 0.1, 0])},
}


def weigh(experts: Tensor | None, logits: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Weights and map [t, 6] that Megatron makes of logits where a pack has these experts [t, 2]."""
    asked = Chosen(1)
    packed = type("Packed", (), {})
    if experts is not None:
        layers = torch.stack([torch.zeros_like(experts), experts]).long()
        packed.experts = layers, layers == UNROUTED
    asked.take(None, (), {"packed_seq_params": packed})
    return topk_routing_with_score_function(logits, 2, router_replay=asked, **KINDS[kind])  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_router_weighs_given_experts_as_its_own(kind: str) -> None:
    logits = torch.randn(5, 6, generator=torch.Generator().manual_seed(1), requires_grad=True)
    weights, chosen = topk_routing_with_score_function(logits, 2, **KINDS[kind])
    indices = chosen.nonzero()[:, 1].view(5, 2).flip(1).int()
    for given in (None, indices, torch.full_like(indices, UNROUTED)):
        replayed, where = weigh(given, logits, kind)
        assert torch.equal(where, chosen)
        torch.testing.assert_close(replayed, weights, rtol=1e-6, atol=0)
        (gradient,) = torch.autograd.grad(replayed @ torch.arange(6.0), logits, torch.ones(5), retain_graph=True)
        (own,) = torch.autograd.grad(weights @ torch.arange(6.0), logits, torch.ones(5), retain_graph=True)
        torch.testing.assert_close(gradient, own, rtol=1e-5, atol=1e-6)


def test_unknown_tokens_go_where_the_router_sends_them() -> None:
    logits = torch.tensor([[0.0, 1, 2, 3, 4, 5], [5.0, 4, 3, 2, 1, 0]])
    weights, chosen = weigh(torch.tensor([[1, 0], [UNROUTED] * 2]), logits, "softmax of all")
    assert chosen.nonzero().tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    torch.testing.assert_close(weights[chosen], logits.softmax(-1)[chosen])
