"""A GPU that takes its time: what its streams are asked for happens later, in any order that their waits allow."""

from __future__ import annotations

import contextlib
import functools
import math
import random
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

DEVICE = torch.device("cuda:0")
LATER = (Tensor.copy_, torch._foreach_add_, torch._fused_adamw_)
"""What a stream does when it comes to it; all write in place."""


class Event:
    """A place in a stream."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.happened, self._gpu = False, gpu

    def happen(self) -> None:
        self.happened = True

    def synchronize(self) -> None:
        while not self.happened:
            assert self._gpu.advance(), "streams wait for one another"


class Stream:
    """As much of `torch.cuda.Stream` as host state uses."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.queue: deque[tuple[Event | None, Callable[[], object]]] = deque()
        self._gpu = gpu
        gpu.streams.append(self)

    def ready(self) -> bool:
        """Whether there is something first, and it can happen."""
        return bool(self.queue) and (self.queue[0][0] is None or self.queue[0][0].happened)

    def wait_event(self, event: Event) -> None:
        self.queue.append((event, event.happen))

    def record_event(self) -> Event:
        event = Event(self._gpu)
        self.queue.append((None, event.happen))
        return event

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.record_event().synchronize()


class FakeGpu(TorchFunctionMode):
    """While entered, tensors on `cuda:0`, all float32, are in its memory. Tensors get what others had as soon as nobody
    holds it, as in torch; when the main stream comes to where that was, it is full of NaN, and so is what is new.

    Attributes:
        floats: In use.
        peak: The most that were.
        at_once: The most streams that had something to copy at one time, without the main one.
        asked: How often for what.
        fails: What is refused, the how-manyth time.
    """

    def __init__(self, patch: Any, seed: int) -> None:
        """`seed` says which order."""
        super().__init__()
        self._random = random.Random(seed)
        self._pace = self._random.choice((0.0, 0.5, 0.8))
        self._favours = defaultdict[int, float](lambda: self._random.choice((0.02, 1.0)))
        self.streams: list[Stream] = []
        self._main = self._current = Stream(self)
        self._used: dict[int, NDArray[np.float32]] = {}
        self._free = defaultdict[int, list[NDArray[np.float32]]](list)
        self._pinned: dict[int, Tensor] = {}
        self.floats = self.peak = self.at_once = 0
        self.asked: Counter[str] = Counter()
        self.fails: tuple[str, int] | None = None
        patch.setattr(torch.cuda, "Stream", lambda device: Stream(self))
        patch.setattr(torch.cuda, "current_stream", lambda device: self._current)
        patch.setattr(torch.cuda, "stream", self._inside)

    def put(self, values: Tensor) -> Tensor:
        """A tensor in its memory."""
        return self._later(Tensor.copy_, self._allocate(values.shape), values)  # type: ignore[no-any-return]

    def settle(self) -> None:
        """Wait for the main stream."""
        self._main.synchronize()

    def advance(self) -> bool:
        """One stream does one thing, if any can."""
        able = [stream for stream in self.streams if stream.ready()]
        copying = [stream for stream in able if isinstance(stream.queue[0][1], functools.partial)]
        self.at_once = max(self.at_once, len({*copying} - {self._main}))
        if able:
            weights = [self._favours[self.streams.index(stream)] for stream in able]
            with torch._C.DisableTorchFunction():
                self._random.choices(able, weights)[0].queue.popleft()[1]()
        return bool(able)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == Tensor.is_cuda.__get__:
            return args[0].data_ptr() in self._used
        if func == Tensor.device.__get__ and args[0].data_ptr() in self._used:
            return DEVICE
        if func == Tensor.is_pinned:
            return args[0].data_ptr() in self._pinned
        if func == Tensor.pin_memory:
            return args[0] if args[0].data_ptr() in self._pinned else self._allocate_host(args[0].shape).copy_(args[0])
        if func == Tensor.to:
            return self._later(Tensor.copy_, self._allocate(args[0].shape), args[0])
        if func in LATER:
            return self._later(func, *args, **kwargs)
        if func not in (torch.empty_like, torch.zeros_like, torch.zeros):
            return func(*args, **kwargs)
        shape = args[0].shape if isinstance(args[0], Tensor) else args[0]
        if torch.device(kwargs.get("device", DEVICE)) != DEVICE:
            return self._allocate_host(shape)
        place = self._allocate(shape)
        return place if func == torch.empty_like else self._later(Tensor.zero_, place)

    def _later(self, func: Callable[..., object], *args: Any, **kwargs: Any) -> Any:
        """It holds no memory of the GPU."""
        self._ask(func.__name__)
        args_there, kwargs_there = tree_map_only(Tensor, self._memory, (args, kwargs))
        self._current.queue.append((None, functools.partial(func, *args_there, **kwargs_there)))
        while self._random.random() < self._pace:
            self.advance()
        return args[0]

    def _ask(self, what: str) -> None:
        """Raises where the test wants it."""
        self.asked[what] += 1
        if self.fails == (what, self.asked[what]):
            raise torch.OutOfMemoryError(what)

    def _allocate(self, shape: Sequence[int]) -> Tensor:
        self._ask("GPU memory")
        size = math.prod(shape)
        memory = self._free[size].pop() if self._free[size] else np.full(size, np.nan, np.float32)
        handle = memory.view()
        self._used[memory.ctypes.data] = memory
        self.floats += size
        self.peak = max(self.peak, self.floats)
        weakref.finalize(handle, self._release, memory)
        return torch.from_numpy(handle).view(shape)

    def _allocate_host(self, shape: Sequence[int]) -> Tensor:
        self._ask("host memory")
        place = torch.full(tuple(shape), torch.nan)
        self._pinned[place.data_ptr()] = place
        return place

    def _release(self, memory: NDArray[np.float32]) -> None:
        del self._used[memory.ctypes.data]
        self.floats -= memory.size
        self._main.queue.append((None, lambda: memory.fill(np.nan)))
        self._free[memory.size].append(memory)

    def _memory(self, tensor: Tensor) -> Tensor:
        """What does not keep the tensor's memory from being free."""
        memory = self._used.get(tensor.data_ptr())
        return tensor if memory is None else torch.from_numpy(memory).view(tensor.shape)

    @contextlib.contextmanager
    def _inside(self, stream: Stream) -> Iterator[None]:
        self._current, before = stream, self._current
        try:
            yield
        finally:
            self._current = before
