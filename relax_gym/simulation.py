"""The real loop in simulated time: an event loop that jumps to its next timer, an engine and a learner that take time.

Runs of hours take seconds, and are the same each time: nothing depends on how fast the machine is.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import random
import selectors
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from relax_gym.errors import SamplerError
from relax_gym.sampler import Sampler, SamplingParams, Session, Weights
from relax_gym.types import Completion, FinishReason, Placed
from relax_gym.workers import Worker, in_threads

T = TypeVar("T")
INSTANT = 1e-6
"""Seconds in which requests count as simultaneous: threads may bring them in any order."""


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop whose `time()` begins at 0, stands still while anything works, and jumps when all wait for a timer.

    What a `Worker` computes, such as the building of an env, takes no time unless it calls `sleep`. Sockets and
    processes that answer by themselves have no place here: time would not wait for them.
    """

    def __init__(self) -> None:
        self._simulated = 0.0
        self._asleep = 0
        self._executor: Worker | None = None
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        """Simulated seconds."""
        return self._simulated

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """As `asyncio.run`, in this loop, which is closed then."""
        with asyncio.Runner(loop_factory=lambda: self) as runner:
            return runner.run(main)

    def sleep(self, seconds: float) -> None:
        """In a thread that this loop waits for: return so much simulated time later."""
        woken = threading.Event()

        def wake() -> None:
            self._asleep -= 1
            woken.set()

        def lie_down() -> None:
            self._asleep += 1
            self.call_later(seconds, wake)

        self.call_soon_threadsafe(lie_down)
        woken.wait()

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """In one thread, which counts as working until it is done."""
        self._executor = self._executor or Worker("simulated")
        return asyncio.ensure_future(self._executor.call(func, *args))

    def close(self) -> None:
        """End the thread too."""
        if self._executor is not None:
            self._executor.stop()
        super().close()

    def threads_work(self) -> bool:
        """Whether a thread will answer without time going on."""
        return sum(not call.done() and call.get_loop() is self for call in list(in_threads)) > self._asleep

    def jump(self, seconds: float) -> None:
        """Let so much time pass."""
        self._simulated += seconds


class _JumpingSelector(selectors.DefaultSelector):
    """Instead of waiting it lets the loop's time jump, unless a thread is about to answer."""

    def __init__(self, loop: SimulatedLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            return super().select(timeout)
        if events := super().select(0):
            return events
        if timeout is None or self._loop.threads_work():
            return super().select(None)
        self._loop.jump(timeout)
        return []


def heavy_tailed(median: float, sigma: float, most: int) -> Callable[[int], int]:
    """Lengths by seed: lognormal with this median and standard deviation of the logarithm, from 1 to `most`."""

    def length(seed: int) -> int:
        drawn = random.Random(seed).lognormvariate(math.log(median), sigma)
        return max(1, min(most, round(drawn)))

    return length


@dataclass(slots=True, eq=False)
class _Request:
    """`left` tokens of decoding as of `since`, and the versions of the tokens that are sampled by then."""

    tokens: int
    left: float
    done: asyncio.Future[None]
    versions: list[int] = field(default_factory=list)
    since: float = 0.0
    timer: asyncio.TimerHandle | None = None


class SimulatedEngine(Sampler):
    """Decodes up to `concurrency` requests side by side, the rest waits in the order it came.

    A completion repeats one token. Weights change in flight: for `publish_seconds` nothing is decoded, then requests go
    on with the new version.

    Args:
        lengths: tokens of a completion by the seed of its request, such as `heavy_tailed(…)`.
        tokens_per_second: of one request, however many run beside it; or a function of how many are decoded at once.
        token: the id that completions consist of.
    """

    def __init__(
        self,
        lengths: Callable[[int], int],
        *,
        concurrency: int,
        tokens_per_second: float | Callable[[int], float],
        publish_seconds: float = 0.0,
        token: int = 100,
    ) -> None:
        self._lengths, self._places = lengths, concurrency
        self._speed_of = tokens_per_second if callable(tokens_per_second) else lambda _: tokens_per_second
        self._speed, self._publish_seconds, self.token = self._speed_of(1), publish_seconds, token
        self._version, self._opened, self._busy = -1, 0, 0.0
        self._paused = False
        self._waiting: list[tuple[float, int, _Request]] = []
        self._running: dict[_Request, None] = {}

    @property
    def version(self) -> int:
        """The last that was published."""
        return self._version

    @property
    def max_context(self) -> int:
        """More than anybody asks for."""
        return 2**20

    async def start(self) -> None:
        """Nothing to load."""

    def open_session(self) -> Session:
        """Simultaneous requests are served in the order of this."""
        self._opened += 1
        return _SimulatedSession(self, self._opened)

    async def update_weights(self, weights: Weights, version: int) -> None:
        """Stop decoding for as long as it takes."""
        for _ in weights:
            pass
        self._paused = True
        for request in self._running:
            self._stop(request)
        await asyncio.sleep(self._publish_seconds)
        self._version, self._paused = version, False
        for request in self._running:
            self._go_on(request)
        self._fill()

    async def aclose(self) -> None:
        """Nothing to free."""

    def metrics(self) -> Mapping[str, float]:
        """Seconds of decoding since the last call, of all requests together."""
        for request in self._running:
            self._stop(request)
            if not self._paused:
                self._go_on(request)
        busy, self._busy = self._busy, 0.0
        return {"busy_seconds": busy}

    async def decode(self, session: int, params: SamplingParams) -> Completion:
        """A request's completion, once it is decoded."""
        wanted = self._lengths(params.seed or 0)
        tokens, loop = min(wanted, params.max_new_tokens), asyncio.get_running_loop()
        request = _Request(tokens, float(tokens), loop.create_future())
        heapq.heappush(self._waiting, (loop.time(), session, request))
        loop.call_later(INSTANT, self._fill)
        try:
            await request.done
        finally:
            self._forget(request)
        return Completion(
            token_ids=(self.token,) * tokens,
            logprobs=(-0.5,) * tokens,
            versions=tuple(request.versions),
            finish_reason=FinishReason.STOP if tokens == wanted else FinishReason.LENGTH,
        )

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._places and not self._paused:
            *_, request = heapq.heappop(self._waiting)
            self._running[request] = None
            self._go_on(request)
        if not self._paused:
            self._keep_pace()

    def _keep_pace(self) -> None:
        """As many run as run now."""
        speed = self._speed_of(max(1, len(self._running)))
        if speed == self._speed:
            return
        for request in self._running:
            self._stop(request)
        self._speed = speed
        for request in self._running:
            self._go_on(request)

    def _go_on(self, request: _Request) -> None:
        loop = asyncio.get_running_loop()
        request.since = loop.time()
        request.timer = loop.call_later(request.left / self._speed, self._finish, request)

    def _stop(self, request: _Request) -> None:
        if request.timer is None:
            return
        request.timer.cancel()
        request.timer = None
        passed = asyncio.get_running_loop().time() - request.since
        request.left = max(0.0, request.left - passed * self._speed)
        self._busy += passed
        sampled = request.tokens - math.ceil(request.left - 1e-6)
        request.versions += [self._version] * (sampled - len(request.versions))

    def _finish(self, request: _Request) -> None:
        self._stop(request)
        request.versions += [self._version] * (request.tokens - len(request.versions))
        if not request.done.done():
            request.done.set_result(None)
        self._forget(request)

    def _forget(self, request: _Request) -> None:
        """Its place is free, whether it was decoded or cancelled."""
        self._stop(request)
        if request in self._running:
            del self._running[request]
        elif not request.done.done() or request.done.cancelled():
            self._waiting = [waiting for waiting in self._waiting if waiting[-1] is not request]
            heapq.heapify(self._waiting)
        self._fill()


class _SimulatedSession(Session):
    def __init__(self, engine: SimulatedEngine, number: int) -> None:
        self._engine, self._number = engine, number
        self._closed = False

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, media: Sequence[Placed] = ()
    ) -> Completion:
        if self._closed:
            raise SamplerError("the session is closed; open a new one for each episode")
        return await self._engine.decode(self._number, params)

    def close(self) -> None:
        self._closed = True
