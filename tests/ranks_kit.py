"""Objects for `Ranks`: one that computes together over gloo, and one without torch, whose processes start fast."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from relax_gym.errors import ConfigError, TrainingError
from relax_gym_trainers.megatron_learner.rank_service import Place


class Plain:
    """Remembers what it was called with; fails when told to."""

    def __init__(self, place: Place, *arguments: Any) -> None:
        self.place, self.arguments = place, arguments
        self.seen: Any = None

    def get(self, name: str) -> Any:
        return getattr(self, name)

    def store(self, *values: Any) -> None:
        self.seen = values

    def tell(self, folder: str) -> None:
        """What each rank has, as a file."""
        with open(os.path.join(folder, str(self.place.rank)), "w") as file:
            file.write(repr((self.seen, self.arguments, os.environ.get("OF_RANK"))))

    def tell_variable(self, name: str, folder: str) -> None:
        """What it is in each rank's environment, as a file."""
        with open(os.path.join(folder, str(self.place.rank)), "w") as file:
            file.write(os.environ.get(name, ""))

    def add_one(self, array: Any) -> None:
        array += 1  # what arrives can be written to, and is this rank's own
        self.seen = array.sum()

    def wait(self) -> None:
        time.sleep(3600)

    def wait_on(self, rank: int) -> None:
        if self.place.rank == rank:
            self.wait()

    def fail(self, rank: int, how: str) -> None:
        """What goes wrong on one rank while the others wait for it."""
        if self.place.rank == rank or rank < 0:
            print("now it goes wrong", file=sys.stderr)
            match how:
                case "raise":
                    raise ValueError("no such luck")
                case "refuse":
                    raise TrainingError("the loss is not finite")
                case "quit":
                    sys.exit("enough")
                case "exit":
                    os._exit(3)
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "hang":
                    self.wait()
        self.meet()

    def meet(self) -> None:
        """Nothing to do together."""


class Gloo(Plain):
    def __init__(self, place: Place, *arguments: Any) -> None:
        import torch
        import torch.distributed as dist

        super().__init__(place, *arguments)
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=place.init_method, rank=place.rank, world_size=place.world)

    def total(self, value: float) -> float:
        """The sum of value · (rank + 1)."""
        import torch
        import torch.distributed as dist

        tensor = torch.tensor([value * (self.place.rank + 1)])
        dist.all_reduce(tensor)
        return tensor.item()

    def meet(self) -> None:
        self.total(1.0)

    def close(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()


class Unmade:
    """Cannot be made on one rank."""

    def __init__(self, place: Place, rank: int, how: str) -> None:
        if place.rank == rank:
            if how == "refuse":
                raise ConfigError("learner.tp = 3 divides nothing")
            os._exit(5)
