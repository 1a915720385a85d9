"""What optimizers keep, in host memory except while they step."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from relax_gym_trainers.reference import on_host, room_on_host, settle

PIECE_BYTES = 1 << 30
"""Of moments that fill a piece, which ends with the parameter that does. Two pieces are on the device at a time."""

TO_DEVICE, TO_HOST = 0, 1
"""The lanes of a GPU."""

Slot = tuple[dict[str, Any], str]
"""An optimizer's state of a parameter, and a key of it."""


class HostState:
    """Moments, and float32 copies of weights where an optimizer has them.

    The copies are on the device for a whole update. Moments come a piece at a time: while one is stepped with, the next
    one comes and the one before leaves, so that both directions of the bus are used and the device never holds all.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], modules: Sequence[torch.nn.Module]) -> None:
        """From now on it is in host memory. The weights of `modules` stay where they are, and so do views of them."""
        weights = [parameter for module in modules for parameter in module.parameters()]
        stay = {weight.untyped_storage().data_ptr() for weight in weights}
        stepped = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        self._optimizers, self._device = optimizers, weights[0].device
        self._copies = [p for p in stepped if p.untyped_storage().data_ptr() not in stay]
        self.leave()

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """The optimizers can step."""
        homes = [copy.data for copy in self._copies]
        for optimizer in self._optimizers:
            optimizer.step = functools.partial(self._step, optimizer, optimizer.step)  # type: ignore[assignment]
        try:
            for copy in self._copies:
                copy.data = copy.data.to(self._device, copy=True, non_blocking=True)
            yield
        finally:
            for optimizer in self._optimizers:
                del optimizer.step
            for copy, home in zip(self._copies, homes, strict=True):
                copy.data = home.copy_(copy.data, non_blocking=True)
            self.leave()

    def leave(self) -> None:
        """What is on a GPU goes to host memory, and what a checkpoint has brought there is pinned for one."""
        for copy in self._copies:
            copy.data = self._at_home(copy.data)
        for optimizer in self._optimizers:
            for state, name in _slots(optimizer.state.values()):
                state[name] = self._at_home(state[name])
        settle([self._device])

    def _at_home(self, tensor: Tensor) -> Tensor:
        if tensor.is_cuda:
            return on_host(tensor)
        return tensor.pin_memory() if self._device.type == "cuda" else tensor  # itself where it is pinned

    def _step(self, optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> None:
        """What `step`, the optimizer's own, does, for some parameters after others."""
        groups = optimizer.param_groups
        pieces = [(group, {**group, "params": some}) for group in groups for some in _pieces(group["params"])]
        visits = [_Visit(optimizer, piece["params"], self._device) for _, piece in pieces]
        try:
            for number, ((group, piece), visit) in enumerate(zip(pieces, visits, strict=True)):
                if number == 0:
                    visit.come()
                else:
                    visits[number - 1].end()
                if visit is not visits[-1]:
                    visits[number + 1].come()
                visit.arrive()
                optimizer.param_groups = [piece]
                step()
                group.update({**piece, "params": group["params"]})  # some optimizers count their steps there
                visit.go()
        finally:
            optimizer.param_groups = groups
            for lane in _lanes(self._device):
                lane.synchronize()


def restore(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """`optimizer.load_state_dict(saved)`, but moments stay in the host memory that they are in."""
    optimizer.load_state_dict({**saved, "state": {}})
    names = [name for group in saved["param_groups"] for name in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for name, parameter in zip(names, parameters, strict=True):
        for key, value in saved["state"].get(name, {}).items():
            optimizer.state[parameter][key] = value if value.ndim else value.to(parameter.device)


class _Visit:
    """The moments of some parameters on the device."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], device: torch.device) -> None:
        self._optimizer, self._parameters, self._device = optimizer, parameters, device
        self._homes: dict[tuple[int, str], Tensor] = {}
        self._moved: list[Tensor] = []
        self._event: torch.cuda.Event | None = None

    def come(self) -> None:
        """Begin to copy what there is of them. The first step makes them, on the device."""
        slots = self._slots()
        homes = [state[name] for state, name in slots]
        self._homes = {(id(state), name): home for (state, name), home in zip(slots, homes, strict=True)}
        self._move(TO_DEVICE, slots, homes, [torch.empty_like(home, device=self._device) for home in homes])

    def arrive(self) -> None:
        """What is computed from now on has them on the device."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)

    def go(self) -> None:
        """Begin to copy them back, when what is computed until now is done."""
        slots = self._slots()
        here = [state[name] for state, name in slots]
        self._move(TO_HOST, slots, here, [self._home(slot) for slot in slots])

    def end(self) -> None:
        """Wait until they are there, and give their memory on the device back."""
        if self._event is not None:
            self._event.synchronize()
        self._moved = []

    def _slots(self) -> list[Slot]:
        return _slots(self._optimizer.state.get(parameter, {}) for parameter in self._parameters)

    def _home(self, slot: Slot) -> Tensor:
        state, name = slot
        known = self._homes.get((id(state), name))
        return room_on_host(state[name]) if known is None else known

    def _move(self, lane: int, slots: Sequence[Slot], values: list[Tensor], places: Sequence[Tensor]) -> None:
        """Copy, and let the optimizer find the copies."""
        lanes = _lanes(self._device)
        if lanes:
            lanes[lane].wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(lanes[lane]) if lanes else contextlib.nullcontext():
            for (state, name), value, place in zip(slots, values, places, strict=True):
                state[name] = place.copy_(value, non_blocking=True)
        self._moved, self._event = values, lanes[lane].record_event() if lanes else None


@functools.cache
def _lanes(device: torch.device) -> tuple[torch.cuda.Stream, ...]:
    """`TO_DEVICE` and `TO_HOST` of a GPU, for all that move there; a CPU needs none."""
    return tuple(torch.cuda.Stream(device) for _ in (TO_DEVICE, TO_HOST)) if device.type == "cuda" else ()  # type: ignore[no-untyped-call]


def _pieces(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Of so many parameters each that two moments of them, in float32, have `PIECE_BYTES`."""
    piece: list[Tensor] = []
    size = 0
    for parameter in parameters:
        piece.append(parameter)
        size += 8 * parameter.numel()
        if size >= PIECE_BYTES:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece


def _slots(states: Iterable[dict[str, Any]]) -> list[Slot]:
    """Where moments are. The count of steps, a scalar, stays where its optimizer wants it."""
    return [(state, name) for state in states for name, value in state.items() if getattr(value, "ndim", 0)]
