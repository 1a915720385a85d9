"""Ranks as actors of a Ray cluster, each with a GPU of its own where there are any."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_gym.errors import ConfigError, TrainingError
from relax_gym_trainers.megatron_learner.rank_processes import (
    GRACE_SECONDS,
    Other,
    accept,
    connect,
    listen,
    meeting_point,
)
from relax_gym_trainers.megatron_learner.rank_service import Link, Place, serve_link

PASSED_ON = ("CUDA_DEVICE_", "GLOO_", "HF_", "NCCL_", "OMP_", "RELAX_GYM_", "TORCH_")
"""Beginnings of the names of variables that actors have from the trainer's environment."""


class Seat:
    """An actor, which becomes a rank once it is known where all are."""

    def where(self) -> tuple[str, list[Any]]:
        """Its machine's address, and the GPUs that Ray gave it."""
        ray = import_ray()
        return ray.util.get_node_ip_address(), ray.get_gpu_ids()

    def serve(self, address: tuple[str, int], key: bytes, place: Place, log: Path | None) -> None:
        """Be a rank until rank 0 ends it. Output goes to `log`, if its folder is there on this machine too."""
        _take(import_ray().get_gpu_ids())
        if log is not None and log.parent.is_dir():
            with open(log, "ab") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
        serve_link(connect(address, key, place), place, parent=None)


class RayOther(Other):
    """A rank in an actor."""

    def __init__(self, rank: int, link: Link, log: Path | None, actor: Any, serving: Any, host: str) -> None:
        super().__init__(rank, link, log=log if log and log.exists() else None)
        self._actor, self._serving, self._host = actor, serving, host

    def kill(self) -> None:
        super().kill()
        import_ray().kill(self._actor)

    def _obituary(self) -> str:
        ray = import_ray()
        try:
            ray.get(self._serving, timeout=GRACE_SECONDS)
        except ray.exceptions.RayError as error:
            return f"on {self._host} has ended: {str(error).strip().splitlines()[0]}"
        return f"on {self._host} has ended"


@dataclass(frozen=True, slots=True)
class Cluster:
    """What `start` has taken of a cluster."""

    store: Any
    init_method: str
    others: list[Other]
    free: Callable[[], None]


def import_ray() -> Any:
    """Raises ConfigError where Ray is not installed."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(
            f'learner.launcher = "ray" needs Ray: pip install "relax-gym[ray]" on all machines ({error})'
        ) from error


def start(world: int, logs: Path | None, timeout: float) -> Cluster:
    """Ranks 1 to `world` - 1 on the cluster that this machine is in, or on one that Ray starts here. Rank 0 stays in
    this process, and what it needs is taken on this machine. Ranks of one machine have numbers in a row.

    Raises:
        ConfigError: Ray is not installed.
        TrainingError: there is no room within `timeout` seconds, or a rank cannot start.
    """
    ray, deadline = import_ray(), time.monotonic() + timeout
    with contextlib.ExitStack() as held:
        if not ray.is_initialized():
            ray.init(log_to_driver=False, logging_level="warning")
            held.callback(ray.shutdown)
        host = ray.util.get_node_ip_address()
        seats = _seats(ray, world, host, deadline, held)
        store, init_method = meeting_point(host)
        listener, key = listen(host, world)
        serving: dict[int, Any] = {}
        places = {rank: Place(rank=rank, world=world, init_method=init_method) for rank in range(1, world)}
        paths = {rank: _log(logs, rank) for rank in places}
        for rank, place in places.items():
            serving[rank] = seats[rank][0].serve.remote(listener.address, key, place, paths[rank])
        links = accept(listener, world, deadline, check=lambda: _check(ray, serving))
        others: list[Other] = [
            RayOther(rank, links[rank], paths[rank], seats[rank][0], serving[rank], seats[rank][1]) for rank in places
        ]
        return Cluster(store, init_method, others, held.pop_all().close)


def _seats(ray: Any, world: int, host: str, deadline: float, held: contextlib.ExitStack) -> list[tuple[Any, str]]:
    """(actor, address of its machine) by rank. The first only keeps the place of rank 0."""
    import torch
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    gpus = int(torch.cuda.is_available())
    bundles = [{"CPU": 1.0, "GPU": float(gpus)} for _ in range(world)]
    bundles[0][f"node:{host}"] = 0.001
    group = placement_group(bundles, strategy="PACK")
    held.callback(remove_placement_group, group)
    variables = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    try:
        ray.get(group.ready(), timeout=max(0.0, deadline - time.monotonic()))
    except ray.exceptions.GetTimeoutError:
        what = "GPUs" if gpus else "CPUs"
        raise TrainingError(
            f"the Ray cluster had no room for {world} ranks, one of them on {host}: each takes one of its {what}, and "
            f"there are {ray.cluster_resources().get(what[:-1], 0):g}, of which "
            f"{ray.available_resources().get(what[:-1], 0):g} are free"
        ) from None
    actors = []
    for index in range(world):
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        options = {"num_cpus": 1, "num_gpus": gpus, "runtime_env": {"env_vars": variables}}
        actors.append(ray.remote(Seat).options(scheduling_strategy=strategy, **options).remote())
    held.callback(lambda: [ray.kill(actor) for actor in actors])
    where = ray.get([actor.where.remote() for actor in actors], timeout=max(0.0, deadline - time.monotonic()))
    _take(where[0][1])
    order = sorted(range(world), key=lambda index: (index > 0, where[index][0] != host, where[index], index))
    return [(actors[index], where[index][0]) for index in order]


def _take(gpus: Sequence[int | str]) -> None:
    """Have this process use the GPU that Ray has given its rank, if any. Ray's names are those of CUDA_VISIBLE_DEVICES
    where the cluster was started; torch counts what this process sees: in an actor usually that GPU alone.

    Raises:
        ConfigError: this process does not see it.
    """
    if not gpus:
        return
    name, visible = str(gpus[0]), os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = [] if visible is None else [one.strip() for one in visible.split(",")]
    if name in seen:
        os.environ["LOCAL_RANK"] = str(seen.index(name))
    elif visible is None and name.isdecimal():
        os.environ["LOCAL_RANK"] = name
    else:
        having = "without CUDA_VISIBLE_DEVICES" if visible is None else f"with CUDA_VISIBLE_DEVICES={visible}"
        raise ConfigError(
            f"Ray has given a rank of the learner the GPU {name}, which its process, started {having}, does not see; "
            "start the Ray cluster and the trainer with the same CUDA_VISIBLE_DEVICES, or both without"
        )


def _log(logs: Path | None, rank: int) -> Path | None:
    if logs is None:
        return None
    logs.mkdir(parents=True, exist_ok=True)
    return logs.absolute() / f"rank-{rank}.log"


def _check(ray: Any, serving: dict[int, Any]) -> None:
    """Raises TrainingError for a rank that has ended before it began."""
    for rank, task in serving.items():
        if ray.wait([task], timeout=0)[0]:
            try:
                ray.get(task)
            except ray.exceptions.RayError as error:
                raise TrainingError(f"rank {rank} of {len(serving) + 1} cannot start: {error}") from error
