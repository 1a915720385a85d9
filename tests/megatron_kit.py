"""Runs a function on every rank of a layout, in processes forked from the one that has imported Megatron."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from relax_gym_trainers.megatron_learner import parallel
from relax_gym_trainers.megatron_learner.parallel import Layout


def on_ranks(layout: Layout, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What `function(layout, *args)` gives on each rank, by rank; the ranks are initialised over gloo.

    Results go through `torch.save`. An error of a rank is raised here with its traceback.
    """
    folder = Path(tempfile.mkdtemp(prefix="ranks-"))
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns of forking a process that has threads; those of torch are idle here.
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            mp.start_processes(
                _rank, args=(layout, folder, function, args), nprocs=layout.world_size, start_method="fork"
            )
        return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(layout.world_size)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _rank(rank: int, layout: Layout, folder: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    parallel.initialise(layout, rank, f"file://{folder}/meeting", "gloo")
    torch.save(function(layout, *args), folder / f"{rank}.pt")
    dist.barrier()
    parallel.destroy()
