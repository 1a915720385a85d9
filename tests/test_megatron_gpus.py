"""The layouts of the Megatron learner over NCCL. Where there are fewer GPUs than ranks, some share one."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from megatron_learner_kit import (
    OPTIONS,
    Case,
    Expected,
    Folders,
    Outcome,
    batches,
    gap,
    outcome,
    rank_learner,
    without_times,
)

from relax_gym.errors import TrainingError
from relax_gym_trainers.megatron_learner.learner import MegatronLearner
from relax_gym_trainers.megatron_learner.options import MegatronLearnerOptions
from relax_gym_trainers.megatron_learner.parallel import Layout
from relax_gym_trainers.megatron_learner.rank_service import Place
from relax_gym_trainers.megatron_learner.ray_ranks import RayOther

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


@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_ranks_on_a_ray_cluster_train_each_on_a_gpu_of_its_own(
    expected: Expected, folders: Folders, tmp_path: Path
) -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed; it is in the extra `ray`")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    wanted = expected("dense", STEPS)
    ray.init(num_cpus=2, num_gpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        options = MegatronLearnerOptions(**{**OPTIONS, **STEPS.options, "tp": 2, "launcher": "ray"})
        context = dataclasses.replace(STEPS.context(folders["dense"]), run_dir=tmp_path / "run")
        trainer = MegatronLearner(context, options)
        apart = {name: value for name, value in gap(outcome(trainer, STEPS), wanted).items() if value > TOLERANCE}
        assert apart == {}
        assert ray.available_resources().get("GPU", 0) == 0
        other = trainer._ranks._others[0]
        assert isinstance(other, RayOther)
        ray.kill(other._actor)
        with pytest.raises(TrainingError, match=r"in step, rank 1 of 2 on [0-9.]+ has ended: "):
            trainer.step(STEPS.steps[0])
        trainer.close()
        again = MegatronLearner(context, options)  # what was taken is free
        assert again.step(STEPS.steps[0])["updates"] == 2
        again.close()
    finally:
        ray.shutdown()


def _rank(rank: int, world: int, cases: Sequence[tuple[Path, Layout]], folder: Path) -> None:
    if world > torch.cuda.device_count():  # NCCL refuses ranks of one host that share a GPU
        os.environ |= {"NCCL_HOSTID": f"host-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    place = Place(rank=rank, world=world, init_method=f"file://{folder}/meeting")
    torch.save(list(_outcomes(place, cases)), folder / f"{rank}.pt")


def _outcomes(place: Place, cases: Sequence[tuple[Path, Layout]]) -> Iterator[Outcome]:
    impatient = dataclasses.replace(STEPS, options={**STEPS.options, "timeout": 120.0, "start_timeout": 120.0})
    for number, (model, layout) in enumerate(cases):
        trainer = rank_learner(layout, place, number, model, impatient)
        yield outcome(trainer, STEPS)
        trainer.close()
