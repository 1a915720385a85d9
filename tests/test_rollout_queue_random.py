"""The queue with tasks that really wait, in random interleavings: some sequential order gives what they were given."""

import asyncio

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from queue_model import MustWaitError, Size, group, now


class Interleaved(RuleBasedStateMachine):
    """Calls that wait are left waiting while others come. After each, a second queue does what was answered, in the
    order of the answers and never waiting; it must give the same answers and be able to, so the order is sequential.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.admits: list[asyncio.Task[int | None]] = []
        self.getting: asyncio.Task[list[int]] | None = None
        self.done: list[tuple[str, object]] = []
        self.running: dict[int, int] = {}
        self.version = self.step = 0
        self.promised: set[int] = set()  # what the next step takes, as the queue said while it waited

    @initialize(
        per_step=st.integers(1, 3),
        staleness=st.integers(0, 3),
        rule=st.sampled_from([("slot", 0), ("ready", 0), ("ready", 1), ("ready", 3)]),
        every=st.integers(1, 2),
    )
    def begin(self, per_step: int, staleness: int, rule: tuple[str, int], every: int) -> None:
        size = Size(
            groups_per_step=per_step,
            max_staleness=staleness,
            last_step=8,
            order=rule[0],
            oversample=rule[1],
            update_every=every,
        )
        self.size, self.queue, self.other = size, size.queue(0, []), size.queue(0, [])
        self.queue._on_late = lambda slot, late, empty: self.running.pop(slot, None)

    def settle(self) -> None:
        for _ in range(10):
            self.loop.run_until_complete(asyncio.sleep(0))

    async def note_admit(self) -> int | None:
        slot = await self.queue.admit()
        self.done.append(("admit", slot))
        if slot is not None:
            self.running[slot] = self.version
        return slot

    async def note_get(self) -> list[int]:
        got = [one.slot for one in await self.queue.get(self.step)]
        self.done.append(("get", got))
        assert self.size.oversample or self.promised <= set(self.queue._taken)
        self.promised = set()
        return got

    async def note_put(self, slot: int, version: int) -> None:
        self.done.append(("put", (slot, version)))  # a group is there before anything is awaited
        await self.queue.put(slot, group(slot, version))

    @precondition(lambda self: len(self.admits) < 4)
    @rule()
    def admit(self) -> None:
        self.admits.append(self.loop.create_task(self.note_admit()))

    @precondition(lambda self: self.getting is None and self.step < 8)
    @rule()
    def get(self) -> None:
        self.getting = self.loop.create_task(self.note_get())

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, 3))
    def put(self, data: st.DataObject, count: int) -> None:
        """Several at a time, before anybody who waits gets to run."""
        for slot in data.draw(st.permutations(sorted(self.running)))[:count]:
            self.loop.create_task(self.note_put(slot, self.running.pop(slot)))

    @precondition(lambda self: self.admits)
    @rule()
    def stop_waiting(self) -> None:
        self.admits.pop().cancel()

    @precondition(lambda self: self.getting is not None and self.getting.done())
    @rule()
    def publish(self) -> None:
        self.getting, self.step = None, self.step + 1

        async def advance() -> None:
            self.version = self.step // self.size.update_every
            self.done.append(("advance", self.version))
            await self.queue.advance(self.version)

        self.loop.create_task(advance())

    @rule()
    def let_run(self) -> None:
        """Nobody sleeps through what he waits for."""
        self.settle()
        assert self.getting is None or self.getting.done() or self.queue._choose() is None
        assert all(task.done() for task in self.admits) or not self.queue._may_go_on()

    @invariant()
    def some_sequential_order_gives_the_same(self) -> None:
        if not hasattr(self, "queue"):
            return
        self.queue.check()
        if self.queue.step == self.step:
            self.promised.update(self.queue._chosen())
        self.loop.run_until_complete(self.replay())
        self.admits = [task for task in self.admits if not task.done()]
        if self.getting is not None and self.getting.done():
            self.getting.result()

    async def replay(self) -> None:
        events, self.done = self.done, []
        for name, value in events:
            try:
                if name == "admit":
                    assert now(self.other.admit()) == value
                elif name == "get":
                    assert [one.slot for one in now(self.other.get(self.other.step))] == value
                elif name == "put":
                    slot, version = value  # type: ignore[misc]
                    now(self.other.put(slot, group(slot, version)))
                else:
                    now(self.other.advance(value))  # type: ignore[arg-type]
            except MustWaitError:
                raise AssertionError(f"{name} was answered with {value}, and could not have been") from None

    def teardown(self) -> None:
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.settle()
        self.loop.close()


TestK111Interleaved = Interleaved.TestCase
TestK111Interleaved.settings = settings(max_examples=15, stateful_step_count=40, deadline=None)
