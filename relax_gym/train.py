"""The one training loop. Synchronous training is this loop with max_staleness = 0."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from relax_gym.build import Parts, build_learner, build_parts, build_trackers
from relax_gym.checkpoints import Checkpoints
from relax_gym.cleanup import Cleanup, closed_on_failure
from relax_gym.config import RunConfig
from relax_gym.context import Tracker
from relax_gym.credit import UNSCORED, assign_credit, batch_drop_reasons
from relax_gym.curve import draw_curve
from relax_gym.errors import Stopped, TrainingError, first_cause
from relax_gym.evaluate import evaluate
from relax_gym.learner import Learner
from relax_gym.meters import StepClock
from relax_gym.metrics import consumed_shares, episode_metrics, merged, staleness_metrics
from relax_gym.plugins import plugins
from relax_gym.producer import Producer
from relax_gym.redaction import check_secrets
from relax_gym.rollout_queue import LATE
from relax_gym.run_folder import RunFolder
from relax_gym.run_lock import run_lock
from relax_gym.run_log import log_file
from relax_gym.running import run
from relax_gym.scoring import FailureLog
from relax_gym.stopping import LeftUndone, Stopping
from relax_gym.supervision import Supervisor
from relax_gym.timeline import Timeline, count, learner_span
from relax_gym.types import Batch, Group, Metrics, Trajectory
from relax_gym.warmup import demonstrations
from relax_gym.workers import Streamed, Worker
from relax_gym.writer import Writer

log = logging.getLogger("relax_gym")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a finished run hands back. `evaluations` are (step, metrics), the first at step 0 unless resumed."""

    run_dir: Path
    steps: int
    metrics: Metrics
    evaluations: list[tuple[int, Metrics]] = field(default_factory=list)


def train(config: RunConfig, *, resume: bool = False) -> RunResult:
    """Run a config to its end in this process.

    Raises:
        Stopped: by SIGTERM or SIGINT, once a checkpoint is saved. A second signal ends the process at once.
        RelaxGymError: anything the user can act on; the run folder keeps all that was finished.
    """
    check_secrets(config)
    folder = RunFolder(config, resume=resume)
    with run_lock(folder.path), log_file(folder.path / "run.log"):
        start_step, checkpoint = folder.checkpoints()[-1] if resume and folder.checkpoints() else (0, None)
        with closed_on_failure() as built:
            parts = build_parts(config, start_step=start_step)
            built.add(parts.aclose)
            trackers = build_trackers(parts.context)
            for tracker in trackers:
                built.add(tracker.close)
            learner = build_learner(parts.context)
        try:
            return run(_run(Trainer(parts, learner, trackers, folder, checkpoint)))
        except BaseExceptionGroup as group:
            raise first_cause(group) from group


async def _run(trainer: Trainer) -> RunResult:
    async with Cleanup() as cleanup:
        cleanup.add(trainer.draw_curve)
        return await trainer.run()


class Trainer:
    """Connects player, queue and learner for one run."""

    def __init__(
        self,
        parts: Parts,
        learner: Learner,
        trackers: list[Tracker],
        folder: RunFolder,
        checkpoint: Path | None = None,
    ) -> None:
        self._parts = parts
        self._config = parts.context.config
        self._start = parts.context.start_step
        self._learner = learner
        self._thread = Worker("learner")
        self._trackers = trackers
        self._folder = folder
        self._checkpoint = checkpoint
        self._hook = plugins().hook
        self._player = parts.player()
        self._writer = Writer(folder)
        self._producer = Producer(parts, self._player, self._writer, self._episode_ended, checkpoint)
        self._queue = self._producer.queue
        self._evaluations: list[tuple[int, Metrics]] = []
        self._metrics: Metrics = {}
        self._checkpoints = Checkpoints(parts.context, learner, folder)
        self._empty_steps = 0
        self._last_error = ""
        self._reward_failures = FailureLog()
        self._done = self._saved = self._start
        self._stopping = Stopping()
        self._supervisor = Supervisor(self._config.supervision, folder.path, self._facts)

    async def run(self) -> RunResult:
        """Warm up, then train to the last step. Whatever happens, everything is closed and no finished group lost."""
        steps = self._config.train.steps
        async with Cleanup() as cleanup:
            cleanup.enter_context(self._stopping.listening())
            await cleanup.enter_async_context(self._supervisor)
            cleanup.enter_context(Timeline(self._folder.path, self._config.timeline.max_mib))
            cleanup.add(partial(self._supervisor.close, "the run folder", self._writer.close))
            try:
                await self._stopping.unless_asked(self._start_up(cleanup))
            except LeftUndone:
                raise self._stopped() from None
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._producer.run())
                for step in range(self._start, steps):
                    await self._step_or_stop(step)
        return RunResult(run_dir=self._folder.path, steps=steps, metrics=self._metrics, evaluations=self._evaluations)

    async def _start_up(self, cleanup: Cleanup) -> None:
        await self._begin(cleanup)
        if self._start == 0:
            await self._warm_up()
        await self._publish()  # always before the first rollout: a resumed sampler would wait for ever otherwise
        if self._start == 0:
            await self._evaluate_and_log()

    async def _begin(self, cleanup: Cleanup) -> None:
        """Start what was built; only then is the run folder in use. What is closed first is added last."""
        context, close, wait = self._parts.context, self._supervisor.close, self._supervisor.wait
        cleanup.add(self._thread.stop)
        closing = partial(self._thread.call, self._learner.close)  # after what the thread still does, e.g. a save
        cleanup.add(partial(close, "the learner", closing))
        for tracker in self._trackers:
            cleanup.add(tracker.close)
        cleanup.add(partial(close, "envs and rewards", self._player.aclose))
        cleanup.add(partial(close, "the sampler", self._parts.sampler.aclose))
        if self._checkpoint is not None:
            loading = self._thread.call(self._learner.load, self._checkpoint)
            await wait(f"the learner, to load {self._checkpoint.name}", "start", loading)
        await self._rest()  # servers that start take a share of what is free
        await wait("the sampler, to start", "start", self._parts.sampler.start())
        beginning = asyncio.to_thread(self._producer.begin, resumed=self._checkpoint is not None)
        await wait("the run folder, to forget what was after the checkpoint", "start", beginning)
        cleanup.add(partial(self._hook.on_run_end, context=context))
        cleanup.add(partial(close, "a checkpoint", partial(self._call_checkpoint, self._checkpoints.finish)))
        cleanup.add(self._written)
        cleanup.add(self._producer.keep_waiting)
        self._hook.on_run_start(context=context)

    def draw_curve(self) -> None:
        """Draw the metrics so far, if there are any."""
        if self._folder.metrics_path.exists():
            draw_curve(self._folder.metrics_path, self._folder.path / "reward.png")

    # Training --------------------------------------------------------------------------------------------------------

    def _filter_batch(self, step: int, groups: list[Group]) -> list[Group]:
        """The groups that stay when those of a step are compared with each other; the rest are not replaced."""
        reasons = batch_drop_reasons(groups, self._parts.algorithms)
        for group, reason in zip(groups, reasons, strict=True):
            if reason is not None:
                self._queue.leave_out(group, reason)
                self._producer.record_drop(step, group, reason)
        return [group for group, reason in zip(groups, reasons, strict=True) if reason is None]

    def _episode_ended(self, step: int, evaluation: bool, trajectory: Trajectory) -> None:
        level = logging.INFO if evaluation else logging.WARNING  # rewards that compare cannot score what is played once
        if trajectory.error is not None:
            self._last_error = trajectory.error.message
        elif (failure := self._reward_failures.add(trajectory, level)) and not evaluation:
            self._last_error = failure
        if not evaluation:
            self._producer.meter.episode(trajectory)
        self._hook.on_episode_end(step=step, trajectory=trajectory, evaluation=evaluation)

    async def _warm_up(self) -> None:
        config = self._config.warmup
        if config is None:
            return
        steps = demonstrations(config, self._player, self._parts.tasks, seed=self._config.seed)
        async for shown in steps:
            if not shown.batch.samples:
                raise TrainingError("[warmup] every expert episode failed; see run.log and try `relax-gym envs check`")
            imitating = self._thread.call(partial(self._learner.imitate, shown.batch, lr=config.lr))
            learner = await self._supervisor.wait("the learner, to imitate", "learner", imitating)
            self._hook.on_warmup_step(step=shown.step, metrics={**learner, "episode/errors": shown.errors})

    async def _rest(self) -> None:
        if self._parts.sampler.shares_devices:
            await self._supervisor.wait("the learner, to free memory", "learner", self._thread.call(self._learner.rest))

    async def _publish(self) -> None:
        await self._rest()
        with closing(Streamed(self._thread, self._learner.weights)) as weights:  # too many to have all at once
            version = self._version_at(self._learner.version)
            updating = self._parts.sampler.update_weights(weights, version)
            await self._supervisor.wait(f"the publication of version {version}", "publish", updating)
        count("version", sampler=version)

    def _version_at(self, steps: int) -> int:
        """The policy version after so many steps: the last one that was published by then."""
        return steps // self._config.train.update_every

    async def _collect(self, step: int, clock: StepClock) -> list[Group]:
        """The groups of a step. While it waits for the last ones, the learner prepares those that are there."""
        seen, name = set[int](), f"the groups of step {step + 1}"
        while groups := await self._supervisor.wait(name, "rollout", self._queue.next_finished(seen)):
            seen.update(group.slot for group in groups)
            preparing = self._thread.call(self._prepare, groups)
            with clock.part("prepare"):
                await self._supervisor.wait(f"the learner, to prepare {len(groups)} groups", "learner", preparing)
        groups = await self._supervisor.wait(name, "rollout", self._queue.get(step))
        self._producer.count()
        return groups

    def _prepare(self, groups: list[Group]) -> None:
        self._learner.prepare(assign_credit(groups, self._parts.algorithms, whole=False))

    async def _step(self, step: int) -> None:
        """Train on the groups of one step, publish, log, and only then let the next rollouts start."""
        clock = StepClock()
        self._producer.meter.step_begins()
        waiting = self._collect(step, clock)
        leave = step % self._config.train.update_every == 0  # else its checkpoint would be of weights never published
        played = await (self._stopping.unless_asked(waiting) if leave else waiting)
        groups = self._filter_batch(step + 1, played)
        clock.lap("rollout_wait")
        for group in groups:  # before anything can fail
            self._writer.add_group(step + 1, group, kind="train")
        self._producer.kept.take(step + 1, played, saved_version=self._version_at(self._saved))
        samples = assign_credit(groups, self._parts.algorithms)
        trajectories = [trajectory for group in played for trajectory in group.trajectories]
        dropped = self._producer.take_dropped(step + 1)
        self._check_trainable(step, trajectories, dropped)
        batch = Batch(version=self._version_at(step), samples=samples)
        self._hook.on_batch(batch=batch)
        if self._queue.idle:  # otherwise the next rollouts have begun
            settling, wait = self._producer.settle(), self._supervisor.wait
            await wait("aborted episodes, to let go of the sampler", "rollout", settling)
            await wait("the sampler, to free its memory", "publish", self._parts.sampler.rest())
        training = self._thread.call(self._learner.step, batch)
        learner = await self._supervisor.wait(f"the learner's step {step + 1}", "learner", training)
        clock.lap("train")
        if (step + 1) % self._config.train.update_every == 0:
            await self._publish()
        clock.lap("publish")
        await self._written()
        clock.lap("write")
        metrics = {
            **merged(episode_metrics(trajectories), self._engine_metrics()),
            **staleness_metrics(samples, batch.version),
            **{f"learner/{key}": value for key, value in learner.items()},
            **{f"queue/dropped_{reason}": count for reason, count in dropped.items()},
            **consumed_shares(groups, [env.id for env in self._config.env]),
            "queue/empty_slots": self._config.train.groups_per_step - len(groups),
            **clock.metrics(batch.trained_tokens),
            **self._producer.meter.metrics(),
        }
        await self._finish_step(step + 1, metrics)

    async def _finish_step(self, step: int, metrics: Metrics) -> None:
        config = self._config
        last = step == config.train.steps
        if config.eval.episodes and (last or (config.eval.every and step % config.eval.every == 0)):
            metrics |= await self._evaluate(step)
        self._log(step, metrics)
        self._hook.on_step_end(step=step, metrics=metrics)
        await self._call_checkpoint(self._checkpoints.finish)  # written while this step ran
        if last or (config.checkpoint.every and step % config.checkpoint.every == 0):
            await self._save(step, whole=last)
        self._done = step
        await self._queue.advance(self._version_at(step))

    async def _save(self, step: int, *, whole: bool) -> None:
        await self._written()
        self._saved = step
        await self._call_checkpoint(partial(self._checkpoints.begin, step, self._producer.slots_file(step)))
        if whole:
            await self._call_checkpoint(self._checkpoints.finish)

    async def _step_or_stop(self, step: int) -> None:
        """The step after `step` others; Stopped where the run is to end after it, or instead of it."""
        with suppress(LeftUndone), learner_span("step", number=step + 1):
            await self._step(step)
        at_version = self._done % self._config.train.update_every == 0
        if not self._stopping.asked or not at_version or self._done == self._config.train.steps:
            return
        # The learner may still prepare for the step that was left.
        await self._supervisor.wait("the learner, to end what it prepares", "learner", self._thread.finish())
        if self._saved != self._done:
            await self._save(self._done, whole=True)
        await self._call_checkpoint(self._checkpoints.finish)
        raise self._stopped()

    def _stopped(self) -> Stopped:
        number = self._stopping.signal or signal.SIGTERM
        kept = f"after step {self._done}, which is saved" if self._done else "before its first step was trained"
        return Stopped(number, f"stopped by {signal.Signals(number).name} {kept}")

    def _check_trainable(self, step: int, trajectories: list[Trajectory], dropped: Counter[str]) -> None:
        """Silence is not progress: end the run when nothing was sampled, unless a filter wanted it so.

        An algorithm that keeps none of what was sampled is no fault.
        """
        filtered = dropped.keys() - {UNSCORED, LATE}
        if filtered or any(turn.completion.token_ids for trajectory in trajectories for turn in trajectory.turns):
            self._empty_steps = 0
            return
        self._empty_steps += 1
        limit = self._config.train.max_empty_steps
        if self._empty_steps < limit:
            return
        raise TrainingError(
            f"{limit} steps in a row without one trainable token, the last at step {step + 1}"
            + (f"; the last error of an episode: {self._last_error}" if self._last_error else "")
            + "; look at the episodes with `relax-gym view`, raise train.max_empty_steps if this is expected"
        )

    async def _evaluate_and_log(self) -> None:
        if self._config.eval.episodes:
            self._log(0, await self._evaluate(0))

    async def _evaluate(self, step: int) -> Metrics:
        ended = partial(self._episode_ended, step, True)
        greedy = self._config.eval.greedy
        alone = step == 0 or self._queue.idle
        playing = evaluate(self._player, self._parts.tasks, greedy=greedy, on_end=ended)
        with learner_span("evaluate"):
            result = await self._supervisor.wait("the episodes of an evaluation", "rollout", playing)
        self._writer.add_group(step, Group(group_id="eval", slot=-1, trajectories=result.trajectories), kind="eval")
        await self._written()
        self._evaluations.append((step, result.metrics))
        self._hook.on_evaluation(step=step, metrics=result.metrics)
        counted = self._counters() if alone else {}  # else those of training are among them: the next step reports all
        return {**result.metrics, **{f"eval/{key}": value for key, value in counted.items()}}

    # Records ---------------------------------------------------------------------------------------------------------

    def _engine_metrics(self) -> Metrics:
        out: Metrics = {"queue/in_flight": self._queue.in_flight, "queue/queued": self._queue.queued}
        return {**out, **self._counters(), "perf/loop_lag_max": self._supervisor.last_lag()}

    def _counters(self) -> Metrics:
        """What sampler and rewards have counted since the last call."""
        counted = {f"sampler/{key}": value for key, value in self._parts.sampler.metrics().items()}
        return {**counted, **self._player.reward_metrics()}

    def _log(self, step: int, metrics: Metrics) -> None:
        self._metrics = metrics
        self._folder.add_metrics(step, metrics)
        for tracker in self._trackers:
            tracker.log(step, metrics)

    async def _written(self) -> None:
        """All episodes so far are in the run folder: no checkpoint may be ahead of them, nor a step's metrics."""
        await self._supervisor.wait("episodes, to be written", "checkpoint", self._writer.written())

    async def _call_checkpoint(self, part: Callable[[], tuple[int, Path] | None]) -> None:
        """Call a part of the writing of a checkpoint in the learner's thread; say so when one is whole after it."""
        with learner_span("checkpoint"):
            written = await self._supervisor.wait("a checkpoint", "checkpoint", self._thread.call(part))
        if written is not None:
            step, folder = written
            self._producer.kept.saved(step)
            self._hook.on_checkpoint(step=step, folder=folder)

    def _facts(self) -> dict[str, object]:
        """What status.json says beside waits."""
        account = self._queue.account()
        return {
            "step": self._done,
            "steps": self._config.train.steps,
            "saved_step": self._saved,
            "version": self._version_at(self._done),
            "queue": {**asdict(account), "dropped": dict(account.dropped)},
            "last_error": self._last_error or None,
        }
