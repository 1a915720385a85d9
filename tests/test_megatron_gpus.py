"""The layouts of the Megatron learner over NCCL. Where there are fewer GPUs than ranks, some share one."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from megatron_learner_kit import Case, Expected, Folders, Outcome, batches, gap, outcome, rank_learner, without_times

from relax_gym_trainers.megatron_learner.parallel import Layout
from relax_gym_trainers.megatron_learner.rank_service import Place

pytest_plugins = ["megatron_fixtures"]
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_thread")]

TOLERANCE = 2e-4  # in float32; the order of sums is another one than on a CPU
STEPS = Case(
    algorithm={"kl_coef": 0.1, "entropy_coef": 0.01},
    options={"updates_per_step": 2},
    steps=batches(2, groups=4, size=2),
    temperature=0.8,
)
LAYOUTS = {
    2: [
        ("dense", Layout(tp=2)),
        ("dense", Layout(tp=2, sequence_parallel=False)),
        ("dense", Layout(pp=2)),
        ("deep", Layout(pp=2, vpp=2)),
        ("dense", Layout(cp=2)),
        ("dense", Layout(dp=2)),
        ("experts", Layout(dp=2, ep=2)),
        ("experts", Layout(tp=2, ep=2, etp=1)),
        ("experts", Layout(dp=2, etp=2)),
    ],
    4: [
        ("dense", Layout(tp=2, pp=2)),
        ("dense", Layout(tp=2, cp=2)),
        ("experts", Layout(tp=2, dp=2, ep=2)),
    ],
}


@pytest.mark.parametrize("world", LAYOUTS)
def test_steps_over_nccl_are_those_of_the_torch_learner(
    expected: Expected, folders: Folders, tmp_path: Path, world: int
) -> None:
    cases = [(folders[model], layout) for model, layout in LAYOUTS[world]]
    mp.start_processes(_rank, args=(world, cases, tmp_path), nprocs=world, start_method="spawn")
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(world)]
    for (model, layout), *found in zip(LAYOUTS[world], *ranks, strict=True):
        for one in found:
            assert without_times(one.metrics) == without_times(found[0].metrics), layout
        apart = {name: value for name, value in gap(found[0], expected(model, STEPS)).items() if value > TOLERANCE}
        assert apart == {}, layout


def _rank(rank: int, world: int, cases: Sequence[tuple[Path, Layout]], folder: Path) -> None:
    if world > torch.cuda.device_count():  # NCCL refuses ranks of one host that share a GPU
        os.environ |= {"NCCL_HOSTID": f"host-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    place = Place(rank=rank, world=world, init_method=f"file://{folder}/meeting")
    torch.save(list(_outcomes(place, cases)), folder / f"{rank}.pt")


def _outcomes(place: Place, cases: Sequence[tuple[Path, Layout]]) -> Iterator[Outcome]:
    impatient = dataclasses.replace(STEPS, options={**STEPS.options, "timeout": 120.0, "start_timeout": 120.0})
    for number, (model, layout) in enumerate(cases):
        trainer = rank_learner(layout, place, number, model, impatient)
        found = outcome(trainer, STEPS)
        yield Outcome(found.metrics, {name: tensor.cpu() for name, tensor in found.weights.items()})
        trainer.close()
