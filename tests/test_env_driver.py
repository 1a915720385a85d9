"""One env instance: whose thread it lives on, and that it is closed exactly once however it hangs."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import gymnasium
import pytest

import relax_gym
from relax_gym import Env, StepResult, Task, TimeLimit, user
from relax_gym.env_driver import EnvDriver, EnvFailure
from relax_gym.workers import WorkerThreads

calls: list[tuple[str, int]] = []
release = threading.Event()


class Recording(Env):
    """Notes in which thread what was called; hangs in the call `hang` names."""

    def __init__(self, hang: str = "") -> None:
        self.hang, self.calls, self.release = (
            hang,
            calls,
            release,
        )  # an env of an earlier test that wakes up late notes it there
        self.note("constructor")

    def note(self, what: str) -> None:
        if what == self.hang:
            self.release.wait(20)
        self.calls.append((what, threading.get_ident()))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.note("reset")
        return user("hello"), {}

    def step(self, action: str) -> Any:
        self.note("step")
        return StepResult([], 1.0, True, False, {})

    def expert_action(self) -> Any:
        self.note("expert_action")
        return "right"

    def close(self) -> Any:
        self.note("close")


class RecordingAsync(Recording):
    """The same, async but for the constructor."""

    async def note_async(self, what: str) -> None:
        if what == self.hang:
            await asyncio.Event().wait()
        self.calls.append((what, threading.get_ident()))

    async def reset(self, **kwargs: Any) -> Any:  # type: ignore[override]
        await self.note_async("reset")
        return user("hello"), {}

    async def step(self, action: str) -> Any:
        await self.note_async("step")
        return StepResult([], 1.0, True, False, {})

    async def expert_action(self) -> Any:
        await self.note_async("expert_action")
        return "right"

    async def close(self) -> None:
        await self.note_async("close")


class Bound(Recording):
    """Wants one thread for everything."""

    thread_affinity = True


def wrapped_bound(**kwargs: Any) -> Any:
    return gymnasium.wrappers.TimeLimit(TimeLimit(Bound(**kwargs), max_turns=9), max_episode_steps=9)


def wrapped_async(**kwargs: Any) -> Any:
    return TimeLimit(RecordingAsync(**kwargs), max_turns=9)  # type: ignore[arg-type]


class Odd(Recording):
    """Its helpers fail."""

    @property
    def tools(self) -> Any:  # type: ignore[override]
        raise KeyError("no tools today")

    def expert_action(self) -> Any:
        return 3

    async def random_action(self) -> str:
        raise asyncio.CancelledError if self.hang == "cancel" else SystemExit(4)


class Typo(Recording):
    """Its optional members are properties with a bug, in the way of the wrapper's or the base class's own."""

    @property
    def tools(self) -> Any:  # type: ignore[override]
        return self.tolos

    @property
    def expert_action(self) -> Any:  # type: ignore[override]
        return self.exprt


class TypoOutside(TimeLimit):
    """The same in a wrapper."""

    @property
    def tools(self) -> Any:
        return self.tolos


def wrapped_typo(**kwargs: Any) -> Any:
    return gymnasium.wrappers.TimeLimit(TimeLimit(Typo(**kwargs), max_turns=9), max_episode_steps=9)


def typo_outside(**kwargs: Any) -> Any:
    return gymnasium.wrappers.TimeLimit(TypoOutside(Typo(**kwargs), max_turns=9), max_episode_steps=9)


if "test/Recording-v0" not in relax_gym.list():
    relax_gym.register("test/Recording-v0", Recording)
    relax_gym.register("test/RecordingAsync-v0", RecordingAsync)
    relax_gym.register("test/Bound-v0", Bound)
    relax_gym.register("test/WrappedBound-v0", wrapped_bound)
    relax_gym.register("test/WrappedAsync-v0", wrapped_async)
    relax_gym.register("test/Odd-v0", Odd)
    relax_gym.register("test/Typo-v0", Typo)
    relax_gym.register("test/WrappedTypo-v0", wrapped_typo)
    relax_gym.register("test/TypoOutside-v0", typo_outside)


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    global calls, release
    calls, release = [], threading.Event()
    yield
    release.set()


def drive(
    use: Callable[[EnvDriver], Awaitable[Any]], env: str, *, hang: str = "", timeout: float = 5.0, limit: int = 256
) -> Any:
    async def main() -> Any:
        threads = WorkerThreads("env", limit=limit)
        driver = EnvDriver(Task(env_id=f"test/{env}-v0", seed=1, kwargs={"hang": hang}), threads, timeout)
        try:
            return await use(driver)
        finally:
            await driver.close()
            threads.close()

    return asyncio.run(main())


async def episode(driver: EnvDriver) -> str:
    await driver.reset()
    action = await driver.act("expert_action")
    await driver.step(action)
    return action


async def crowded_episode(driver: EnvDriver) -> None:
    """With others that use the same threads between any two calls."""
    for call in (driver.reset, functools.partial(driver.act, "expert_action"), functools.partial(driver.step, "x")):
        await asyncio.gather(*(driver._threads.call(release.wait, 0.01) for _ in range(3)))
        await call()
    await asyncio.gather(*(driver._threads.call(release.wait, 0.01) for _ in range(3)))


@pytest.mark.parametrize("env", ["Bound", "WrappedBound"])
def test_k88_constructor_reset_step_expert_and_close_are_on_one_thread(env: str) -> None:
    drive(crowded_episode, env)
    assert [what for what, _ in calls] == ["constructor", "reset", "expert_action", "step", "close"]
    assert len({thread for _, thread in calls}) == 1
    assert calls[0][1] != threading.get_ident()


def test_envs_without_affinity_give_their_thread_back() -> None:
    async def many(driver: EnvDriver) -> int:
        await episode(driver)
        for _ in range(4):
            other = EnvDriver(driver.task, driver._threads, 5.0)
            await episode(other)
            await other.close()
        return len({thread for _, thread in calls})

    assert drive(many, "Recording", limit=1) == 1


def test_envs_with_affinity_do_not_use_up_the_shared_threads() -> None:
    async def many(driver: EnvDriver) -> None:
        drivers = [driver, *(EnvDriver(driver.task, driver._threads, 5.0) for _ in range(3))]
        for one in drivers:
            await one.reset()
        for one in drivers:
            await one.step("x")
            await one.close()

    drive(many, "Bound", limit=1)
    assert len({thread for _, thread in calls}) == 4
    assert Counter(what for what, _ in calls) == dict.fromkeys(("constructor", "reset", "step", "close"), 4)


@pytest.mark.parametrize("env", ["Recording", "RecordingAsync", "WrappedAsync", "WrappedBound"])
def test_experts_may_be_async_and_wrapped(env: str) -> None:
    assert drive(episode, env) == "right"
    assert [what for what, _ in calls] == ["constructor", "reset", "expert_action", "step", "close"]


@pytest.mark.parametrize("env", ["Recording", "RecordingAsync", "WrappedAsync", "Bound"])
@pytest.mark.parametrize("hang", ["reset", "step", "expert_action"])
def test_k98_a_hanging_call_is_given_up_and_the_env_closed_once(env: str, hang: str) -> None:
    with pytest.raises(EnvFailure, match=rf"{hang} took longer than rollout.step_timeout = 0.1 s") as caught:
        drive(episode, env, hang=hang, timeout=0.1)
    assert caught.value.timed_out
    release.set()
    wait_for_close()


@pytest.mark.parametrize("env", ["Recording", "RecordingAsync", "WrappedAsync", "Bound"])
def test_k98_an_env_whose_constructor_hung_is_closed_when_it_is_there(env: str) -> None:
    with pytest.raises(EnvFailure, match=r"constructor took longer than rollout.step_timeout = 0.1 s"):
        drive(episode, env, hang="constructor", timeout=0.1)
    assert calls == []
    release.set()
    wait_for_close()
    assert [what for what, _ in calls] == ["constructor", "close"]


@pytest.mark.parametrize("env", ["Recording", "RecordingAsync", "WrappedAsync", "Bound"])
def test_k98_a_hanging_close_is_given_up_and_logged(env: str, caplog: pytest.LogCaptureFixture) -> None:
    assert drive(episode, env, hang="close", timeout=0.1) == "right"
    assert f"env test/{env}-v0 (seed 1): close() failed" in caplog.text
    assert "close took longer than rollout.step_timeout = 0.1 s" in caplog.text


@pytest.mark.parametrize("env", ["Recording", "RecordingAsync", "Bound"])
def test_an_env_made_while_its_episode_is_cancelled_is_not_lost(env: str) -> None:
    async def cancelled(driver: EnvDriver) -> None:
        task = asyncio.create_task(driver.reset())
        while driver._worker is None:  # noqa: ASYNC110 (nobody tells when the thread is lent)
            await asyncio.sleep(0)
        while not calls:  # the loop does not run: the finished constructor and the cancellation meet
            threading.Event().wait(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    drive(cancelled, env)
    wait_for_close()
    assert [what for what, _ in calls] == ["constructor", "close"]


def wait_for_close() -> None:
    for _ in range(1000):
        if "close" in [what for what, _ in calls]:
            break
        threading.Event().wait(0.01)
    assert [what for what, _ in calls].count("close") == 1


def test_faults_of_helpers_are_the_envs() -> None:
    async def ask(driver: EnvDriver) -> None:
        await driver.reset()
        assert not driver.offers("no_such_action")
        with pytest.raises(EnvFailure, match="EnvError: expert_action returned 3; it must return text"):
            await driver.act("expert_action")
        with pytest.raises(EnvFailure, match="SystemExit: 4"):
            await driver.act("random_action")
        with pytest.raises(EnvFailure, match="KeyError: 'no tools today'"):
            driver.tools()

    async def cancel(driver: EnvDriver) -> None:
        await driver.reset()
        with pytest.raises(EnvFailure, match="CancelledError"):
            await driver.act("random_action")

    drive(ask, "Odd")
    drive(cancel, "Odd", hang="cancel")


@pytest.mark.parametrize("env", ["Typo", "WrappedTypo", "TypoOutside"])
def test_an_attribute_error_inside_a_property_is_the_envs_failure_not_a_missing_member(env: str) -> None:
    async def ask(driver: EnvDriver) -> None:
        await driver.reset()
        with pytest.raises(EnvFailure, match=r"AttributeError: .* has no attribute 'tolos'"):
            driver.tools()
        with pytest.raises(EnvFailure, match=r"AttributeError: .* has no attribute 'exprt'"):
            driver.offers("expert_action")
        with pytest.raises(EnvFailure, match=r"AttributeError: .* has no attribute 'exprt'"):
            await driver.act("expert_action")
        with pytest.raises(EnvFailure, match=r"the env has no random_action\(\)"):
            await driver.act("random_action")

    drive(ask, env)


def test_the_close_of_an_env_whose_own_thread_is_stuck_is_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(EnvFailure, match=r"step took longer"):
        drive(episode, "Bound", hang="step", timeout=0.1)
    assert "close" not in [what for what, _ in calls]
    assert caplog.text == ""  # it did not fail, it is still to come
    release.set()
    wait_for_close()
    assert [what for what, _ in calls] == ["constructor", "reset", "expert_action", "step", "close"]
    assert len({thread for _, thread in calls}) == 1
