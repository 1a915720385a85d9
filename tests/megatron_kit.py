"""Runs a function on every rank of a layout, in processes forked from the one that has imported Megatron."""

from __future__ import annotations

import gc
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
    """What `function(layout, *args)` gives on each rank, by rank; the ranks are initialised over gloo."""
    return in_processes(layout.world_size, _joined, layout, function, args)


def in_processes(count: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What `function(number, meeting, *args)` gives in each of `count` processes; `meeting` is where they can meet.

    Results go through `torch.save`. An error of a process is raised here with its traceback.
    """
    folder = Path(tempfile.mkdtemp(prefix="ranks-"))
    gc.collect()  # here, where the threads are that finalizers of an earlier test's learner wait for
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns of forking a process that has threads; those of torch are idle here.
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            mp.start_processes(_process, args=(folder, function, args), nprocs=count, start_method="fork")
        return [torch.load(folder / f"{number}.pt", weights_only=False) for number in range(count)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _process(number: int, folder: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    gc.freeze()  # what the parent's garbage is by then is not this process's
    torch.set_num_threads(1)
    torch.save(function(number, f"file://{folder}/meeting", *args), folder / f"{number}.pt")


def _joined(rank: int, meeting: str, layout: Layout, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    parallel.initialise(layout, rank, meeting, "gloo")
    found = function(layout, *args)
    dist.barrier()
    parallel.destroy()
    return found
