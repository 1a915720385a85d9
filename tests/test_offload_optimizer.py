"""Moments and float32 weights in host memory, and on the devices for updates only."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_cases import context, learner, qwen3, random_batch, save_model, weights
from megatron_learner_kit import TINY, Case, on_ranks, rank_learner, without_times
from torch import Tensor
from transformers import Qwen3Config

from relax_gym.types import Metrics
from relax_gym_trainers import host_state
from relax_gym_trainers.megatron_learner.optimizer import inner
from relax_gym_trainers.megatron_learner.parallel import Layout
from relax_gym_trainers.megatron_learner.rank import RankLearner
from relax_gym_trainers.megatron_learner.rank_service import Place

Found = tuple[list[Metrics], dict[str, Tensor]]


def kept(trainer: RankLearner) -> list[Tensor]:
    """What the optimizer has for itself: float32 copies of weights, if the model has others, and moments."""
    return own(trainer.optimizer.chained_optimizers[0].optimizer, trainer.backend.chunks)


class Steps:
    """Where an optimizer has such tensors while it steps, and how often it does."""

    def __init__(self, optimizer: torch.optim.Optimizer, modules: Sequence[torch.nn.Module]) -> None:
        self.places: set[int] = set()
        self.number = 0
        self._modules = modules
        optimizer.register_step_post_hook(self._look)

    def _look(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self.places |= {tensor.data_ptr() for tensor in own(optimizer, self._modules)}
        self.number += 1


def own(optimizer: torch.optim.Optimizer, modules: Sequence[torch.nn.Module]) -> list[Tensor]:
    model = {p.untyped_storage().data_ptr() for module in modules for p in module.parameters()}
    found = [p for group in optimizer.param_groups for p in group["params"]]
    found += [value for p in found for value in optimizer.state[p].values() if value.dim()]
    return [tensor for tensor in found if tensor.untyped_storage().data_ptr() not in model]


def trained(layout: Layout, place: Place, folder: Path, options: dict[str, Any], out: Path) -> list[Found]:
    """A warm-up, two steps, a checkpoint and two more; then the latter two by learners that load it."""
    host_state.PIECE_BYTES = 1 << 14
    found = []
    for number, (saves, offload) in enumerate(((True, False), (True, True), (False, False), (False, True))):
        case = Case(algorithm={"kl_coef": 0.1}, options={**options, "offload_optimizer": offload})
        trainer, metrics = rank_learner(layout, place, number, folder, case), []
        checkpoint = out / ("offloaded" if offload == saves else "resident")  # which the other kind has written
        if saves:
            metrics = [trainer.imitate(random_batch(9), lr=1e-3)]
            metrics += [trainer.step(random_batch(seed)) for seed in range(2)]
            trainer.save_state(checkpoint)
            trainer.finish_save()
        else:
            trainer.load(checkpoint)
        steps = Steps(inner(trainer.optimizer)[0], trainer.backend.chunks)
        metrics += [trainer.step(random_batch(seed)) for seed in range(2, 4)]
        places = {tensor.data_ptr() for tensor in kept(trainer)}
        assert steps.places.isdisjoint(places) if offload else steps.places == places
        updates = 2 * options.get("updates_per_step", 1)
        assert steps.number > updates if offload else steps.number == updates
        found.append((without_times(metrics), weights(trainer)))
        trainer.close()
    return found


@pytest.mark.parametrize(
    "options",
    [{"dtype": "bfloat16", "updates_per_step": 2}, {"dtype": "bfloat16", "distributed_optimizer": False}, {}],
    ids=str,
)
def test_steps_and_checkpoints_are_the_same_bit_for_bit(tmp_path: Path, options: dict[str, Any]) -> None:
    folder = save_model(tmp_path / "model", Qwen3Config(**TINY))
    for (metrics, last), *others in on_ranks(Layout(dp=2), trained, folder, options, tmp_path):
        assert metrics[-1]["kl"] > 0
        for other, found in others:
            assert other == metrics[-len(other) :]
            assert all(torch.equal(last[name], value) for name, value in found.items())


def test_the_torch_learner_takes_the_same_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_state, "PIECE_BYTES", 1 << 14)
    folder = save_model(tmp_path / "model", qwen3())
    found = []
    for offload in (False, True):
        trainer = learner(context(folder), offload_optimizer=offload)
        metrics = [trainer.imitate(random_batch(9), lr=1e-3), trainer.step(random_batch(0))]
        checkpoint = tmp_path / f"offload {offload}"
        trainer.export(checkpoint)
        trainer.save_state(checkpoint)
        steps = Steps(trainer.optimizer, [trainer.policy.model])
        metrics.append(trainer.step(random_batch(1)))
        places = {tensor.data_ptr() for tensor in own(trainer.optimizer, [trainer.policy.model])}
        assert steps.places.isdisjoint(places) if offload else steps.places == places
        assert steps.number > 1 if offload else steps.number == 1
        found.append((without_times(metrics), weights(trainer)))
    for offload in (False, True):
        trainer = learner(context(folder), offload_optimizer=offload)
        trainer.load(tmp_path / f"offload {not offload}")
        found.append((without_times([trainer.step(random_batch(1))]), weights(trainer)))
    for metrics, last in found:
        assert metrics == found[0][0][-len(metrics) :]
        assert all(torch.equal(found[0][1][name], value) for name, value in last.items())


@pytest.mark.gpu
def test_on_a_gpu_only_weights_are_there_while_the_learner_rests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_state, "PIECE_BYTES", 1 << 24)
    folder = save_model(tmp_path / "model", Qwen3Config(**TINY | {"hidden_size": 512, "intermediate_size": 8192}))
    found = {}
    for number, offload in enumerate((False, False, True)):  # the first has cuBLAS take its workspaces, for good
        case = Case(options={"dtype": "bfloat16", "offload_optimizer": offload})
        place = Place(rank=0, world=1, init_method=f"file://{tmp_path}/meeting")
        gc.collect()  # what the learner before has left
        before = torch.cuda.memory_allocated()
        trainer = rank_learner(Layout(), place, number, folder, case)
        metrics = []
        for seed in range(2):
            metrics.append(trainer.step(random_batch(seed)))
            trainer.rest()
        assert all(tensor.is_pinned() for tensor in kept(trainer)) == offload
        trainer.save_state(tmp_path / f"{offload}")
        trainer.finish_save()
        trainer.load(tmp_path / f"{offload}")
        assert all(tensor.is_pinned() if offload else tensor.is_cuda for tensor in kept(trainer))
        size = sum(tensor.numel() for tensor in weights(trainer).values())
        found[offload] = without_times(metrics), (torch.cuda.memory_allocated() - before) / size
        trainer.close()
        del trainer
    assert found[True][0] == found[False][0]
    assert found[False][1] - found[True][1] == pytest.approx(12, rel=0.1)  # bytes a parameter
    assert found[True][1] < 4  # two of the weights
