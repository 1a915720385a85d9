"""The learner's end of a process group with servers, outside torch.distributed's own bookkeeping."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from relax_gym.errors import SamplerError
from relax_gym.launch import launched_rank

Backend = Literal["nccl", "gloo"]
PATIENCE = 10
"""Torch's own limit as a multiple of ours: NCCL's watchdog ends the whole process, so we must be first."""


class Group:
    """Rank 0 of `world` ranks. `join` and `broadcast` block; `abort` may be called from another thread meanwhile."""

    def __init__(self, backend: Backend, world: int, address: str, timeout: float) -> None:
        """Bind the store that the ranks meet at, to a port that the system chooses.

        Args:
            address: of this machine, as the servers reach it.
            timeout: seconds that joining and each broadcast may take.
        """
        self.backend, self.world, self.address, self.timeout = backend, world, address, timeout
        self.name = f"relax-gym-{uuid.uuid4().hex}"
        self._stopped = threading.Event()
        self._ranks: Any = None
        self._limit = timedelta(seconds=timeout)
        self._store: Any = TCPStore(address, 0, world, True, timeout=self._limit, wait_for_workers=False)
        self.port: int = self._store.port

    def join(self) -> None:
        """Meet the others. With NCCL they meet at the first broadcast only."""
        # Servers wrap the store in the group's name, then torch does so again and adds the device.
        device = "cuda" if self.backend == "nccl" else "cpu"
        # A client of its own, so that `abort` can end the store and with it all that wait at it, this call too.
        store: Any = TCPStore(self.address, self.port, self.world, False, timeout=self._limit, wait_for_workers=False)
        for prefix in (self.name, f"{self.name}/", f"{device}/"):
            store = PrefixStore(prefix, store)
        if self.backend == "gloo":
            self._ranks = dist.ProcessGroupGloo(store, 0, self.world, self._limit)
            return
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._limit * PATIENCE
        self._ranks = dist.ProcessGroupNCCL(store, 0, self.world, options)

    def broadcast(self, flat: Tensor) -> None:
        """Send `flat`. Raises on failure, and SamplerError after `timeout` seconds or `abort`."""
        end = time.monotonic() + self.timeout
        if flat.is_cuda:
            torch.cuda.set_device(flat.device)  # of this thread
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        work = self._ranks.broadcast([flat], options)
        if self.backend == "gloo":
            work.wait(self._limit)
            return
        while not work.is_completed():  # waiting would leave it to the watchdog
            if self._stopped.is_set() or time.monotonic() > end:
                raise SamplerError(f"the broadcast of weights to {self.world - 1} ranks did not end")
            time.sleep(0.0005)
        work.wait()

    def abort(self) -> None:
        """Give up whatever is going on and leave. Blocks while the backend does."""
        self._stopped.set()
        ranks, self._ranks = self._ranks, None
        self._store = None
        if ranks is not None:
            ranks.abort()


def check_nccl() -> None:
    """SGLang switches NCCL's cuMem off for itself; with a learner that has it on, broadcasts hang without a word. It is
    switched off for this process and those that it will start; NCCL reads that once, when it starts.

    Raises:
        SamplerError: NCCL may be in use here already with other settings, or will be in other processes that a launcher
            has started.
    """
    wanted = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
    wrong = {name: os.environ.get(name) for name, value in wanted.items() if os.environ.get(name) != value}
    if not wrong:
        return
    started = dist.is_initialized() and "nccl" in str(dist.get_backend_config())
    if started or launched_rank() is not None or any(value is not None for value in wrong.values()):
        raise SamplerError(
            f"sending weights over NCCL needs {' '.join(f'{name}={value}' for name, value in wanted.items())} in the "
            f"environment of each of the learner's processes before NCCL starts, and there is {wrong}; export them and "
            "start again"
        )
    os.environ.update(wanted)


def own_address(urls: Sequence[str]) -> str:
    """The address of this machine on the way to the servers: loopback only if all are on this machine."""
    found = []
    for url in urls:
        parts = urlsplit(url)
        family, _, _, _, target = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            found.append(str(probe.getsockname()[0]))
    return next((one for one in found if not one.startswith("127.") and one != "::1"), found[0])


async def in_thread(act: Callable[[], None]) -> None:
    """Run a call that may block for ever, in a thread that does not keep the process alive when it is given up."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle(error: Exception | None) -> None:
        if not done.done():
            done.set_result(None) if error is None else done.set_exception(error)

    def run() -> None:
        error: Exception | None = None
        try:
            act()
        except Exception as caught:
            error = caught.with_traceback(None)  # its frames would keep the group alive
        try:
            loop.call_soon_threadsafe(settle, error)
        except RuntimeError:
            return  # the loop is closed: nobody waits any more

    threading.Thread(target=run, daemon=True, name="weights").start()
    await done
