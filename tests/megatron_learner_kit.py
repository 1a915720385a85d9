"""The same steps by the torch learner and by the ranks of the Megatron learner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from learner_cases import SMALL, context, learner, random_batch, save_model, weights
from megatron_kit import in_processes
from megatron_models import by_expert
from torch import Tensor
from transformers import PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from relax_gym.context import RunContext
from relax_gym.types import Batch, Metrics
from relax_gym_trainers.megatron_learner.options import MegatronLearnerOptions
from relax_gym_trainers.megatron_learner.parallel import Layout
from relax_gym_trainers.megatron_learner.rank import RankLearner
from relax_gym_trainers.megatron_learner.rank_service import Place

# A large epsilon, or Adam would make much of differences between gradients of almost 0.
OPTIONS: dict[str, Any] = {"dtype": "float32", "lr": 1e-2, "eps": 1e-3, "micro_batch_tokens": 40}


TINY: dict[str, Any] = {**SMALL, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}


EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
MODELS: dict[str, PretrainedConfig] = {
    "dense": Qwen3Config(**TINY, tie_word_embeddings=True),
    "deep": Qwen3Config(**TINY | {"num_hidden_layers": 4}, tie_word_embeddings=False),
    "experts": Qwen3MoeConfig(**TINY, **EXPERTS),
}


class Folders(dict[str, Path]):
    """Of the models, each written when it is asked for."""

    def __init__(self, parent: Path) -> None:
        super().__init__()
        self.parent = parent

    def __missing__(self, name: str) -> Path:
        self[name] = save_model(self.parent / name, MODELS[name])
        return self[name]


def batches(count: int, *, groups: int = 2, size: int = 3) -> list[Batch]:
    return [random_batch(seed, groups=groups, size=size, version=seed) for seed in range(count)]


def mixed(batch: Batch) -> Batch:
    """Odd groups are of the second env."""
    names = list(dict.fromkeys(sample.group_id for sample in batch.samples))
    samples = [replace(sample, mixture=names.index(sample.group_id) % 2) for sample in batch.samples]
    return replace(batch, samples=samples)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Steps of a learner with these options of learner and algorithm; `imitated` are a warm-up before them, `envs` the
    config's `[[env]]`, `never` tokens that are never sampled."""

    algorithm: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    steps: Sequence[Batch] = field(default_factory=lambda: batches(1))
    imitated: Sequence[Batch] = ()
    envs: Sequence[dict[str, Any]] = ({},)
    temperature: float = 1.0
    never: tuple[int, ...] = ()

    def context(self, folder: Path) -> RunContext:
        plain = context(folder, groups=4, temperature=self.temperature, **self.algorithm)
        data = plain.config.model_dump()
        data["env"] = [{"id": "test/None-v0", **env} for env in self.envs]
        config = type(plain.config).model_validate(data)
        return replace(plain, config=config, never_sampled=self.never)


@dataclass(frozen=True)
class Outcome:
    """What all steps reported, the warm-up's first, and the weights by hub name after the last."""

    metrics: list[Metrics]
    weights: dict[str, Tensor]


Expected = Callable[[str, Case], Outcome]
"""What the torch learner finds with a model of that name."""


def outcome(trainer: Any, case: Case) -> Outcome:
    metrics = [trainer.imitate(batch, lr=1e-2) for batch in case.imitated]
    metrics += [trainer.step(batch) for batch in case.steps]
    return Outcome(metrics, weights(trainer))


def by_torch(folder: Path, case: Case) -> Outcome:
    trainer = learner(case.context(folder), **{**OPTIONS, **case.options})
    found = outcome(trainer, case)
    return Outcome(found.metrics, by_expert(found.weights, trainer.policy.model))


def by_megatron(layout: Layout, folder: Path, cases: Sequence[Case]) -> list[Outcome]:
    """Each case with learners of its own on the same ranks, which all find the same."""
    ranks = on_ranks(layout, _outcomes, folder, cases)
    for other in ranks[1:]:
        for one, two in zip(ranks[0], other, strict=True):
            assert without_times(one.metrics) == without_times(two.metrics)
    return ranks[0]


def _outcomes(layout: Layout, place: Place, folder: Path, cases: Sequence[Case]) -> list[Outcome]:
    found = []
    for number, case in enumerate(cases):
        trainer = rank_learner(layout, place, number, folder, case)
        found.append(outcome(trainer, case))
        trainer.close()
    return found


def rank_learner(layout: Layout, place: Place, number: int, folder: Path, case: Case) -> RankLearner:
    """The `number`-th learner of this rank."""
    sizes = {one.name: getattr(layout, one.name) for one in fields(layout)}
    options = MegatronLearnerOptions(**{**OPTIONS, **case.options, **sizes})
    where = Place(rank=place.rank, world=place.world, init_method=f"{place.init_method}-{number}")
    return RankLearner(where, case.context(folder), options)


def on_ranks(layout: Layout, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What `function(layout, place, *args)` gives on each rank; it joins the others itself."""
    return in_processes(layout.world_size, _placed, layout, function, args)


def _placed(rank: int, meeting: str, layout: Layout, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return function(layout, Place(rank=rank, world=layout.world_size, init_method=meeting), *args)


DIFFERENT = ("seconds", "padded_tokens", "prefix_saved_tokens")
"""Metrics of which each learner has its own."""


def without_times(metrics: Sequence[Metrics]) -> list[Metrics]:
    return [{name: value for name, value in step.items() if name != "seconds"} for step in metrics]


def gap(one: Outcome, two: Outcome) -> dict[str, float]:
    """How far they are apart: metrics relative to their size or 0.01 if that is more, each weight to its largest."""
    assert [set(step) for step in one.metrics] == [set(step) for step in two.metrics]
    assert set(one.weights) == set(two.weights)
    worst: dict[str, float] = {}
    for ours, theirs in zip(one.metrics, two.metrics, strict=True):
        for name in set(theirs) - set(DIFFERENT):
            error = abs(ours[name] - theirs[name]) / max(abs(theirs[name]), 0.01)
            worst[name] = max(worst.get(name, 0.0), error if np.isfinite(error) else float("inf"))
    for name, theirs in two.weights.items():
        error = ((one.weights[name].float() - theirs).abs().max() / theirs.abs().max()).item()
        worst["weights"] = max(worst.get("weights", 0.0), error)
    return worst
