"""What a training run shows: a live panel on a terminal, one plain line for each event anywhere else."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.table import Table

from relax_gym.config import RunConfig
from relax_gym.context import RunContext
from relax_gym.hookspecs import hookimpl
from relax_gym.plugins import plugins

if TYPE_CHECKING:
    from relax_gym.types import Metrics, Trajectory

LAG, TAIL = "staleness/tokens_lag_", "time/episode_p95"
BARS = "▁▂▃▄▅▆▇█"
SPARKLINE_WIDTH = 40
FAULTS = {
    "episode/errors": "errors",
    "episode/unscored": "unscored",
    "episode/empty_completions": "empty",
    "episode/new_segments": "new_segments",
}
FAULTY_ENDINGS = {"stop/prompt_too_long": "prompt_too_long", "stop/timeout": "timeouts"}
"""Logged as shares of the episodes, shown as counts."""


class Display:
    """Observes a run. Registered with the plugin manager for as long as it is entered."""

    def __init__(
        self, config: RunConfig, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._clock = clock
        self._steps = Progress(total=config.train.steps, clock=clock)
        self._warmup: tuple[int, float] | None = None
        self._rewards: list[float] = []
        self._evaluation: str | None = None
        self._metrics: Mapping[str, float] = {}
        self._counts: defaultdict[str, float] = defaultdict(float)
        self._episodes = 0
        self._live = Live(console=self._console, get_renderable=self._panel, refresh_per_second=4)

    def __enter__(self) -> Display:
        plugins().manager.register(self, "relax_gym.display")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        plugins().manager.unregister(self)
        self._live.stop()

    # Events ----------------------------------------------------------------------------------------------------------

    @hookimpl
    def on_run_start(self, context: RunContext) -> None:
        """Show what is about to run."""
        self._steps = Progress(total=context.config.train.steps, first=context.start_step, clock=self._clock)
        if self._console.is_terminal:
            self._live.start()
            return
        resumed = f", resumed after step {context.start_step}" if context.start_step else ""
        self._say(f"run {context.run_dir}  model {context.model_path}{resumed}")

    @hookimpl
    def on_warmup_step(self, step: int, metrics: Metrics) -> None:
        """Ten lines for the whole warm-up."""
        total = self._config.warmup.steps if self._config.warmup else step
        self._warmup = (step, metrics["loss"])
        self._steps.start()
        if step == total or step % max(1, total // 10) == 0:
            self._say(f"warm-up {step:>{len(str(total))}}/{total}  loss {metrics['loss']:.4f}")

    @hookimpl
    def on_episode_end(self, step: int, trajectory: Trajectory, evaluation: bool) -> None:
        """Count towards the step that is being sampled."""
        self._episodes += not evaluation

    @hookimpl
    def on_evaluation(self, step: int, metrics: Metrics) -> None:
        """One line with the held-out reward."""
        self._evaluation = evaluation_text(metrics)
        self._counts["evaluation errors"] += metrics.get("eval/errors", 0.0)
        if step == 0:
            self._steps.start()
        self._say(f"eval after step {step}  {self._evaluation}")

    @hookimpl
    def on_step_end(self, step: int, metrics: Metrics) -> None:
        """One line with what matters of a step."""
        self._warmup, self._episodes, self._metrics = None, 0, metrics
        self._steps.advance(step)
        if "reward/mean" in metrics:
            self._rewards.append(metrics["reward/mean"])
        for name, count in faults(metrics).items():
            self._counts[name] += count
        self._say(step_text(self._steps, metrics))

    @hookimpl
    def on_checkpoint(self, step: int, folder: Path) -> None:
        """Where it is."""
        self._say(f"checkpoint {folder}")

    @hookimpl
    def on_run_end(self, context: RunContext) -> None:
        """Where everything is and how to look at it."""
        self._live.stop()
        self._console.print(f"run folder: {context.run_dir}", markup=False)
        self._console.print(f"look at episodes: relax-gym view {context.run_dir}", markup=False)

    # Rendering -------------------------------------------------------------------------------------------------------

    def _say(self, line: str) -> None:
        if not self._console.is_terminal:
            self._console.print(line, markup=False)

    def _panel(self) -> Table:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        table.add_column(style="cyan")
        table.add_column()
        for name, value in self.facts():
            table.add_row(name, value)
        return table

    def facts(self) -> list[tuple[str, str]]:
        metrics = self._metrics
        facts = [("step", f"{self._steps.step}/{self._steps.total}   {self._steps.eta_text()}")]
        if self._warmup is not None and self._config.warmup is not None:
            step, loss = self._warmup
            facts.append(("warm-up", f"{step}/{self._config.warmup.steps}   loss {loss:.4f}"))
        per_step = self._config.train.groups_per_step * self._config.train.group_size
        facts.append(("episodes", f"{self._episodes} of {per_step} for the next step"))
        if self._rewards:
            facts.append(("reward", f"{self._rewards[-1]:.3f}   {sparkline(self._rewards)}"))
        if self._evaluation is not None:
            facts.append(("held out", self._evaluation))
        facts += [
            (title, text.format(*(metrics[name] for name in names)))
            for title, text, names in PANEL
            if all(name in metrics for name in names)
        ]
        counted = [f"{name} {count:g}" for name, count in self._counts.items() if count]
        return [*facts, ("faults", ", ".join(counted) or "none"), *shares_and_tails(metrics)]


PANEL = (
    ("loss", "{:.4f}   gradient norm {:.3g}", ("learner/loss", "learner/grad_norm")),
    ("speed", "{:.0f} trained tokens/s   {:.1f} s a step", ("perf/tokens_per_second", "time/step")),
    ("staleness", "mean {:.2f}   max {:.0f}", ("staleness/mean", "staleness/max")),
    ("off-policy", "|Δ log-prob| {:.4f}   ratio {:.3f}", ("learner/logprob_diff_mean", "learner/ratio_mean")),
    ("idle", "learner {:.1f} s   sampler {:.1f} s of a step", ("time/learner_bubble", "time/sampler_bubble")),
    ("queue", "{:.0f} in flight   {:.0f} waiting", ("queue/in_flight", "queue/queued")),
    ("sampled", "{:.0f} tokens/s", ("perf/sampled_tokens_per_second",)),
    ("publishing", "{:.2f} s", ("time/publish",)),
)
"""Rows of the panel: title, format, metrics it needs."""


def shares_and_tails(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Rows of what has one metric for each lag or env: the share of the tokens, and how long episodes took."""
    lags = {name.removeprefix(LAG): count for name, count in metrics.items() if name.startswith(LAG)}
    tokens = sum(lags.values()) or 1.0
    shares = "   ".join(f"{lag}: {count / tokens:.0%}" for lag, count in lags.items())
    rows = [("tokens by lag", shares)] if lags else []
    for name in sorted(name for name in metrics if name.startswith(TAIL)):
        env = name.removeprefix(TAIL)
        p50, p95, longest = (metrics[f"time/episode_{part}{env}"] for part in ("p50", "p95", "max"))
        title = f"episodes of {env[1:]}" if env else "episodes took"
        rows.append((title, f"p50 {p50:.1f} s   p95 {p95:.1f} s   longest {longest:.1f} s"))
    return rows


class Progress:
    """How far the run is and how long the rest will take, by the mean time of this session's steps.

    Evaluations and checkpoints between the steps count; what came before the first step (warm-up) does not.
    """

    def __init__(self, *, total: int, first: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.total, self.step = total, first
        self._first = first
        self._clock = clock
        self._seconds = 0.0
        self.start()

    def start(self) -> None:
        """The first step starts now."""
        self._started = self._clock()

    def advance(self, step: int) -> None:
        """Step `step` is done."""
        self.step = step
        self._seconds = self._clock() - self._started

    @property
    def eta(self) -> float | None:
        """Seconds to the end; None before the first step."""
        done = self.step - self._first
        return None if done == 0 else self._seconds / done * (self.total - self.step)

    def eta_text(self) -> str:
        """`eta 73s`, or nothing before the first step."""
        return "" if self.eta is None else f"eta {duration(self.eta)}"


def step_text(progress: Progress, metrics: Mapping[str, float]) -> str:
    """The plain line of a step. What was not measured is left out; faults stand in it only when there are some."""
    parts = [f"step {progress.step:>{len(str(progress.total))}}/{progress.total}"]
    for label, name, form in (
        ("reward", "reward/mean", ".3f"),
        ("loss", "learner/loss", ".4f"),
        ("tokens/s", "perf/tokens_per_second", ".0f"),
        ("lag", "staleness/max", ".0f"),
        ("waited", "time/learner_bubble", ".1f"),
    ):
        if name in metrics:
            parts.append(f"{label} {metrics[name]:{form}}")
    parts += [f"{name} {count:g}" for name, count in faults(metrics).items()]
    if "time/step" in metrics:
        parts.append(f"{metrics['time/step']:.1f}s")
    return "  ".join(filter(None, [*parts, progress.eta_text()]))


def faults(metrics: Mapping[str, float]) -> dict[str, float]:
    """How many of each kind a step had; only those there were."""
    counts = {label: metrics.get(name, 0) for name, label in FAULTS.items()}
    episodes = metrics.get("episode/count", 0)
    counts |= {label: round(metrics.get(name, 0) * episodes) for name, label in FAULTY_ENDINGS.items()}
    counts |= {name.partition("/")[2]: n for name, n in metrics.items() if name.startswith("queue/dropped_")}
    return {label: count for label, count in counts.items() if count}


def evaluation_text(metrics: Mapping[str, float]) -> str:
    """`reward 0.412  accuracy 0.500  errors 2`; `unscored  accuracy 0.500` where no episode could be scored."""
    parts = [f"reward {metrics['eval/reward']:.3f}" if "eval/reward" in metrics else "unscored"]
    if "eval/accuracy" in metrics:
        parts.append(f"accuracy {metrics['eval/accuracy']:.3f}")
    errors = metrics.get("eval/errors", 0)
    return "  ".join([*parts, f"errors {errors:g}"] if errors else parts)


def sparkline(values: Sequence[float]) -> str:
    """The last values as bars between their own lowest and highest."""
    values = values[-SPARKLINE_WIDTH:]
    low, high = min(values), max(values)
    span = high - low or 1.0
    return "".join(BARS[round((value - low) / span * (len(BARS) - 1))] for value in values)


def duration(seconds: float) -> str:
    """`73s`, `12m 05s`, `3h 20m`."""
    whole = round(seconds)
    if whole < 120:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    if minutes < 120:
        return f"{minutes}m {rest:02d}s"
    return f"{minutes // 60}h {minutes % 60:02d}m"
