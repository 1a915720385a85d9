"""What the loop and its rollouts take, as metrics of each step. Times are those of the event loop's clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from relax_gym.timeline import add_learner_span, now
from relax_gym.types import Metrics, Trajectory


class StepClock:
    """The laps of one step: each is `time/<name>` and a span of the timeline."""

    def __init__(self) -> None:
        self._start = self._last = now()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def lap(self, name: str) -> None:
        """All since the last lap was `name`."""
        end = now()
        self._seconds[name] = end - self._last
        add_learner_span(name, self._last, end)
        self._last = end

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """The block is a part of the lap that it is in; several are added up."""
        start = now()
        yield
        end = now()
        self._seconds[name] += end - start
        add_learner_span(name, start, end)

    def metrics(self, trained_tokens: int) -> Metrics:
        """All laps and parts, the whole, and what the learner waited."""
        total = self._last - self._start
        waited = self._seconds["rollout_wait"] - self._seconds["prepare"]
        return {
            **{f"time/{name}": seconds for name, seconds in self._seconds.items()},
            "time/learner_bubble": waited,
            "time/step": total,
            "perf/tokens_per_second": trained_tokens / total if total else 0.0,
        }


class RolloutMeter:
    """What the rollouts of training did since they were last reported."""

    def __init__(self) -> None:
        self._groups = 0
        self._idle = self._since = 0.0
        self._reported: float | None = None
        self._tokens = 0
        self._seconds: defaultdict[str, list[float]] = defaultdict(list)

    def group_begins(self) -> None:
        """One more is in flight."""
        self._groups += 1
        if self._groups == 1:
            self._idle += now() - self._since

    def group_ends(self) -> None:
        """One less is, whatever became of it."""
        self._groups -= 1
        if not self._groups:
            self._since = now()

    def episode(self, trajectory: Trajectory) -> None:
        """It has ended and is scored."""
        self._tokens += sum(len(turn.completion.token_ids) for turn in trajectory.turns)
        self._seconds[trajectory.task.env_id].append(trajectory.seconds)

    def step_begins(self) -> None:
        """The time in which nothing is in flight counts from now."""
        self._idle, self._since = 0.0, now()
        self._reported = self._since if self._reported is None else self._reported

    def metrics(self) -> Metrics:
        """Sampler's bubble since the step began; tokens and episodes since the last report."""
        time = now()
        idle = self._idle + (time - self._since if not self._groups else 0.0)
        passed = time - (time if self._reported is None else self._reported)
        out: Metrics = {
            "time/sampler_bubble": idle,
            "perf/sampled_tokens_per_second": self._tokens / passed if passed else 0.0,
            **episode_times(self._seconds),
        }
        self._reported, self._tokens = time, 0
        self._seconds.clear()
        return out


def episode_times(seconds: dict[str, list[float]]) -> Metrics:
    """Median, 95th percentile and maximum of all episodes, and of each env's where there are several."""
    every = [value for values in seconds.values() for value in values]
    out = _tail(every, "")
    for env, values in seconds.items() if len(seconds) > 1 else ():
        out |= _tail(values, f"/{env}")
    return out


def _tail(seconds: Sequence[float], env: str) -> Metrics:
    if not seconds:
        return {}
    values = np.percentile(seconds, (50, 95, 100))
    return {
        f"time/episode_{name}{env}": float(value) for name, value in zip(("p50", "p95", "max"), values, strict=True)
    }
