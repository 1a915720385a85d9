"""Weights of references and teachers in host memory, and on their devices for their passes only."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_cases import context, save_model
from megatron_learner_kit import TINY, Case, batches, on_ranks, outcome, rank_learner, without_times
from transformers import Qwen3Config

from relax_gym_trainers import reference
from relax_gym_trainers.megatron_learner.distillation import RankTeacher
from relax_gym_trainers.megatron_learner.parallel import Layout
from relax_gym_trainers.megatron_learner.rank_service import Place
from relax_gym_trainers.reference import Reference


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A student and a wider teacher of the same vocabulary."""
    root = tmp_path_factory.mktemp("models")
    for seed, (name, size) in enumerate({"student": 32, "teacher": 64}.items()):
        folder = save_model(root / name, Qwen3Config(**{**TINY, "hidden_size": size}), seed)
        context(folder).tokenizer.save_pretrained(folder)
    return {name: str(root / name) for name in ("student", "teacher")}


def test_a_reference_is_swapped_for_a_pass_and_back_whatever_happens() -> None:
    for offload in (False, True):
        buffer = torch.arange(6.0)
        parameters = [torch.nn.Parameter(torch.empty(0)) for _ in range(2)]
        parameters[0].data, parameters[1].data = buffer[:4].view(2, 2), buffer[4:]
        reference = Reference(parameters, offload=offload)
        reference.take()
        buffer += 10
        with pytest.raises(RuntimeError, match="stop"), reference.inside():
            assert torch.cat([p.detach().flatten() for p in parameters]).tolist() == [0, 1, 2, 3, 4, 5]
            raise RuntimeError("stop")
        assert torch.cat([p.detach().flatten() for p in parameters]).tolist() == [10, 11, 12, 13, 14, 15]
        buffer += 1  # what an optimizer does is what the parameters are
        assert parameters[1].tolist() == [15, 16]
        assert {value.device.type for value in reference.values} == {"cpu"}
        reference.stay_out()
        assert [p.data_ptr() for p in parameters] == [value.data_ptr() for value in reference.values]


@pytest.mark.gpu
def test_on_a_gpu_frozen_weights_are_pinned_and_take_its_memory_only_for_a_pass() -> None:
    parameters = [torch.nn.Parameter(torch.randn(1 << 22, device="cuda")) for _ in range(4)]
    before = torch.cuda.memory_allocated()
    reference = Reference(parameters, offload=True)
    reference.take()
    expected = [parameter.detach().sum() for parameter in parameters]
    for parameter in parameters:
        parameter.data.mul_(2)
    assert all(value.is_pinned() for value in reference.values)
    for _ in range(10):
        with reference.inside():
            assert torch.equal(torch.stack([p.sum() for p in parameters]), torch.stack(expected))
        assert torch.equal(torch.stack([p.sum() for p in parameters]), 2 * torch.stack(expected))
    del expected, parameter
    assert torch.cuda.memory_allocated() - before < 1 << 20
    reference.stay_out()
    assert before - torch.cuda.memory_allocated() > 60 << 20
    with reference.inside():
        assert {parameter.device.type for parameter in parameters} == {"cuda"}


def offloading(layout: Layout, place: Place, models: dict[str, str], case: Case) -> list[Any]:
    found = []
    for number, offload in enumerate((False, True)):
        case = dataclasses.replace(case, options={"offload_reference": offload})
        copied: list[torch.Tensor] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reference, "on_host", lambda tensor, copied=copied: copied.append(tensor) or tensor.clone())
            trainer = rank_learner(layout, place, number, Path(models["student"]), case)
        (teacher,) = trainer.objectives[0].distiller._teachers.values()
        frozen = [*parameters_of(trainer.backend), *parameters_of(teacher.backend)]
        assert len(copied) == (len(frozen) if offload else 0)
        result = outcome(trainer, case)
        assert all(in_buffers(trainer.backend)), "a parameter has left the buffers of its data parallelism"
        kept = {value.data_ptr() for value in trainer.backend.reference.values}
        assert kept.isdisjoint(parameter.data_ptr() for parameter in parameters_of(trainer.backend))
        assert isinstance(teacher, RankTeacher)
        values = [value.data_ptr() for value in teacher.backend.reference.values]
        assert values == ([p.data_ptr() for p in parameters_of(teacher.backend)] if offload else [])
        trainer.close()
        assert {p.device.type for p in parameters_of(teacher.backend)} == {"meta"}
        found.append(result)
    return found


def parameters_of(backend: Any) -> list[torch.nn.Parameter]:
    return [parameter for chunk in backend.chunks for parameter in chunk.parameters()]


def in_buffers(backend: Any) -> Iterator[bool]:
    """For each parameter, whether it is a view of the buffer that the distributed optimizer gathers into."""
    for chunk in backend.chunks:
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            start, end = buffer.param_data.data_ptr(), buffer.param_data.data_ptr() + buffer.param_data.nbytes
            for parameter in buffer.params:
                yield start <= parameter.data_ptr() < end


@pytest.mark.parametrize(
    ("layout", "top_k"),
    [
        (Layout(dp=2), 0),
        pytest.param(Layout(dp=2), 4, marks=pytest.mark.slow),
        pytest.param(Layout(tp=2, pp=2), 0, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_weights_in_host_memory_give_bit_for_bit_the_same(models: dict[str, str], layout: Layout, top_k: int) -> None:
    algorithm = {"name": "opd", "teacher": models["teacher"], "top_k": top_k, "rl_weight": 0.5, "kl_coef": 0.1}
    for resident, offloaded in on_ranks(layout, offloading, models, Case(algorithm=algorithm, steps=batches(2))):
        assert without_times(resident.metrics) == without_times(offloaded.metrics)
        assert resident.metrics[1]["kl"] > 0
        assert all(torch.equal(resident.weights[name], value) for name, value in offloaded.weights.items())
