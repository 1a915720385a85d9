"""Whether an env keeps its contract. Behind `relax-gym envs check`; public through `relax_gym.testing`."""

from __future__ import annotations

import copy
import json
import pickle
import random
import string
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from relax_gym.env import Env, StepResult, attribute, check_reset, check_step
from relax_gym.media.items import Media
from relax_gym.registry import make
from relax_gym.types import Message
from relax_gym.workers import LimitedThread

MAX_TURNS = 50
"""Turns after which the checker leaves an episode that has not ended."""

GARBAGE = (
    "",
    " \n\t",
    "\x00\x1b[0m\ufffd",
    "🜁 ζ 漢字 " * 100,
    "<tool_call>{'name': ",
    '{"name": "no_such_tool", "parameters": []}',
    "</think>",
    "-1e999",
    "a" * 10_000,
)
"""Actions that no env may fail on."""

EnvSource = str | Env | Callable[..., Env]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """One point of the contract: whether it holds, and how or why not."""

    name: str
    passed: bool
    detail: str = ""


class Broken(Exception):
    """A point of the contract that does not hold; the message says how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    action: str
    result: StepResult
    seconds: float

    def matches(self, other: _Step) -> bool:
        """Whether action and outcome are the same, info and time aside."""
        return self.action == other.action and same(self.result[:4], other.result[:4])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Episode:
    observation: list[Message]
    seconds: float
    steps: list[_Step]

    @property
    def ended(self) -> bool:
        return bool(self.steps) and (self.steps[-1].result.terminated or self.steps[-1].result.truncated)

    @property
    def observations(self) -> list[list[Message]]:
        return [self.observation, *(step.result.observation for step in self.steps)]


def check_env(
    env: EnvSource,
    *,
    seed: int = 0,
    episodes: int = 3,
    actions: Sequence[str] | None = None,
    max_seconds: float = 5.0,
    hang_seconds: float = 60.0,
    **kwargs: Any,
) -> list[CheckResult]:
    """Check every point of the env contract and say which hold. All calls are made on one thread.

    Args:
        env: an id, a class or function that builds the env, or an env (which is closed in the end).
        seed: seed of the first episode; the others have the seeds that follow.
        episodes: episodes to play, at least 1, of at most 50 turns.
        actions: what to say turn by turn; by default episodes are played by the env's expert, by its random actions
            and with random text, in turn.
        max_seconds: most seconds that one `reset` or `step` may take.
        hang_seconds: seconds after which a call is given up, as `rollout.step_timeout` does in a run.
        kwargs: arguments of the env's constructor.
    """
    if episodes < 1:
        raise ValueError(f"episodes is {episodes}; it must be at least 1")
    with LimitedThread("env-check", hang_seconds) as thread:
        check = _EnvCheck(thread, env, kwargs, range(seed, seed + episodes), actions)
        results = [attempt("build", check.build)]
        if results[-1].passed:
            results.append(attempt("play", check.play_all))
        if results[-1].passed:
            points = ("spaces", "tools", "media", "expert_action", "random_action", "seed", "state", "garbage")
            results += [attempt(name, getattr(check, f"check_{name}")) for name in points]
            results.append(attempt("time", lambda: check.check_time(max_seconds)))
        if check.open:
            results.append(attempt("close", check.close))
    return results


def assert_env(env: EnvSource, **arguments: Any) -> None:
    """Raise AssertionError with all points of the contract that do not hold. Arguments as for `check_env`."""
    broken = [result for result in check_env(env, **arguments) if not result.passed]
    if broken:
        lines = "\n".join(f"- {result.name}: {result.detail}" for result in broken)
        raise AssertionError(f"{env if isinstance(env, str) else repr(env)} breaks the env contract:\n{lines}")


def attempt(name: str, check: Callable[[], str]) -> CheckResult:
    """Run one check; whatever it raises is why the point does not hold."""
    try:
        return CheckResult(name=name, passed=True, detail=check())
    except Broken as broken:
        return CheckResult(name=name, passed=False, detail=str(broken))
    except Exception as error:
        return CheckResult(name=name, passed=False, detail=f"{type(error).__name__}: {error}")


class _EnvCheck:
    """The points of the contract. Each returns what was seen and raises when the point does not hold."""

    def __init__(
        self,
        thread: LimitedThread,
        source: EnvSource,
        kwargs: Mapping[str, Any],
        seeds: range,
        actions: Sequence[str] | None,
    ) -> None:
        self.thread, self.call = thread, thread.call
        self.source = source
        self.kwargs = kwargs
        self.seeds = seeds
        self.actions = actions
        self.builds = isinstance(source, str | type) or not hasattr(source, "step")
        self.open: list[Any] = []
        self.played: list[_Episode] = []

    def build(self) -> str:
        self.env = self.fresh()
        return type(self.env).__name__

    def play_all(self) -> str:
        self.played = [self.play(self.env, seed) for seed in self.seeds]
        turns = sum(len(episode.steps) for episode in self.played)
        ended = sum(episode.ended for episode in self.played)
        kind = "async" if self.thread.saw_coroutines else "sync"
        return f"{len(self.played)} episodes, {turns} turns, {ended} ended, {kind}"

    def check_spaces(self) -> str:
        for episode in self.played:
            for observation in episode.observations:
                if not self.env.observation_space.contains(observation):
                    raise Broken(f"observation_space does not contain {observation!r:.200}")
            for step in episode.steps:
                if not self.env.action_space.contains(step.action):
                    raise Broken(f"action_space does not contain {step.action!r:.200}")
        return f"{self.env.observation_space!r}, {type(self.env.action_space).__name__}"

    def check_tools(self) -> str:
        names = []
        for tool in attribute(self.env, "tools", ()):
            function = tool.get("function") if isinstance(tool, Mapping) else None
            if not isinstance(function, Mapping) or not {"name", "description", "parameters"} <= function.keys():
                raise Broken(
                    f"{tool!r:.200} is not {{'type': 'function', 'function': {{name, description, parameters}}}}"
                )
            json.dumps(tool)
            names.append(function["name"])
        return ", ".join(names) or "none"

    def check_media(self) -> str:
        kinds: Counter[str] = Counter()
        for part in (part for episode in self.played for part in _parts(episode.observations)):
            kind = part["type"]
            kinds[kind] += 1
            if kind == "text" and not isinstance(part[kind], str):
                raise Broken(f"a text part holds {type(part[kind]).__name__}; it must hold a string")
            if kind != "text" and not _may_be_media(part[kind]):
                raise Broken(
                    f"an {kind} part holds {type(part[kind]).__name__}; give an image, array, path, URL or bytes"
                )
        return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "text only"

    def check_expert_action(self) -> str:
        return self._check_helper("expert_action")

    def check_random_action(self) -> str:
        return self._check_helper("random_action")

    def _check_helper(self, name: str) -> str:
        if attribute(self.env, name) is None:
            return "not offered"
        episode = self.play(self.env, self.seeds[0], kind=name)
        total = sum(float(step.result.reward) for step in episode.steps)
        return f"{len(episode.steps)} turns, {'ended' if episode.ended else 'not ended'}, return {total:g}"

    def check_seed(self) -> str:
        for index, (seed, before) in enumerate(zip(self.seeds, self.played, strict=True)):
            for env, whose in [(self.env, "the same env"), (self.fresh(), "a fresh env")]:
                _compare(before, self.play(env, seed, kind=self.kind(index)), f"seed {seed} again in {whose}")
        return "same seed, same episode" + (
            "" if self.builds else " (only in the same env; give a class to check more)"
        )

    def check_state(self) -> str:
        for index, (seed, whole) in enumerate(zip(self.seeds, self.played, strict=True)):
            env, kind, half = self.fresh(), self.kind(index), len(whole.steps) // 2
            first = self.play(env, seed, kind=kind, turns=half)
            if attribute(env, "get_state") is None:
                return "not offered"
            try:
                state = self.call(attribute(env, "get_state"))
            except NotImplementedError:
                return "the env says that it cannot be resumed"
            try:
                stored = pickle.dumps(state)
            except Exception as error:
                raise Broken(f"get_state() cannot be pickled ({error}); override get_state and set_state") from error
            other = self.fresh()
            self.call(other.reset, seed=seed + 1)
            self.call(attribute(other, "set_state"), pickle.loads(stored))
            rest = self.go_on(other, first, self.policy(other, seed, kind), MAX_TURNS)
            _compare(whole, rest, f"seed {seed} resumed from get_state() at turn {half}")
        return "resumed episodes go on the same way"

    def check_garbage(self) -> str:
        for text in GARBAGE:
            self.call(self.env.reset, seed=self.seeds[0])
            try:
                check_step(self.call(self.env.step, text))
            except Exception as error:
                raise Broken(f"step({text!r:.60}) failed: {type(error).__name__}: {error}") from error
        return f"{len(GARBAGE)} odd actions"

    def check_time(self, max_seconds: float) -> str:
        resets = [episode.seconds for episode in self.played]
        steps = [step.seconds for episode in self.played for step in episode.steps]
        slowest = max([*resets, *steps])
        if slowest > max_seconds:
            raise Broken(f"the slowest reset or step took {slowest:.3g} s; allowed are {max_seconds:g}")
        return f"reset {1e3 * max(resets):.2f} ms, step {1e3 * max(steps, default=0.0):.2f} ms at most"

    def close(self) -> str:
        while self.open:
            self.call(self.open.pop().close)
        return "closed once"

    def fresh(self) -> Any:
        """A new env, or the only one there is."""
        if not self.builds and self.open:
            return self.open[0]

        def constructor() -> Any:
            if isinstance(self.source, str):
                return make(self.source, **self.kwargs)
            return self.source(**self.kwargs) if self.builds else self.source  # type: ignore[operator]

        self.open.append(self.call(constructor))
        return self.open[-1]

    def kind(self, index: int) -> str:
        """Who plays episode `index`."""
        offered = [name for name in ("expert_action", "random_action") if attribute(self.env, name) is not None]
        kinds = [*offered, "text"] if self.actions is None else ["actions"]
        return kinds[index % len(kinds)]

    def policy(self, env: Any, seed: int, kind: str) -> Callable[[int], str]:
        if kind == "actions":
            assert self.actions is not None
            return self.actions.__getitem__
        if kind == "text":
            return lambda turn: _random_text(random.Random(f"{seed}/{turn}"))
        return lambda turn: self.call(attribute(env, kind))

    def play(self, env: Any, seed: int, *, kind: str | None = None, turns: int = MAX_TURNS) -> _Episode:
        kind = kind or self.kind(seed - self.seeds[0])
        start = time.perf_counter()
        observation, _ = check_reset(self.call(env.reset, seed=seed))
        episode = _Episode(observation=observation, steps=[], seconds=time.perf_counter() - start)
        return self.go_on(env, episode, self.policy(env, seed, kind), turns)

    def go_on(self, env: Any, episode: _Episode, policy: Callable[[int], str], turns: int) -> _Episode:
        steps = list(episode.steps)
        turns = turns if self.actions is None else min(turns, len(self.actions))
        while len(steps) < turns and not (steps and (steps[-1].result.terminated or steps[-1].result.truncated)):
            returned = [episode.observation, *(step.result.observation for step in steps)]
            kept = copy.deepcopy(returned[-1])
            action = policy(len(steps))
            if not isinstance(action, str):
                raise Broken(f"an action must be text, but the env offers {action!r:.100}")
            start = time.perf_counter()
            result = check_step(self.call(env.step, action))
            steps.append(_Step(action=action, result=result, seconds=time.perf_counter() - start))
            if not same(returned[-1], kept):
                raise Broken("step changed the messages it had returned before; return new ones every time")
        return _Episode(observation=episode.observation, steps=steps, seconds=episode.seconds)


def _random_text(rng: random.Random) -> str:
    return "".join(rng.choices(string.ascii_letters + string.digits + " ", k=rng.randint(0, 12)))


def _parts(observations: list[list[Message]]) -> Iterator[Mapping[str, Any]]:
    for message in (message for observation in observations for message in observation):
        if isinstance(message.get("content"), list | tuple):
            yield from message["content"]


def _may_be_media(value: Any) -> bool:
    forms = (str, bytes, Path, np.ndarray, Mapping, list, tuple, Media)
    return isinstance(value, forms) or hasattr(value, "tobytes")


def _compare(expected: _Episode, got: _Episode, what: str) -> None:
    if not same(expected.observation, got.observation):
        raise Broken(
            f"{what}: the first observation differs: {expected.observation!r:.150} and {got.observation!r:.150}"
        )
    for turn, (one, other) in enumerate(zip(expected.steps, got.steps, strict=False)):
        if not one.matches(other):
            pair = f"{(one.action, *one.result[:4])!r:.200} and {(other.action, *other.result[:4])!r:.200}"
            raise Broken(f"{what}: turn {turn} differs: {pair}")
    if len(expected.steps) != len(got.steps):
        raise Broken(f"{what}: {len(expected.steps)} turns and {len(got.steps)} turns")


def same(a: Any, b: Any) -> bool:
    """Equality of messages, media included; NaN equals NaN."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if hasattr(a, "tobytes") and hasattr(b, "tobytes"):
        return type(a) is type(b) and a.tobytes() == b.tobytes()
    return bool(a == b) or (a != a and b != b)
