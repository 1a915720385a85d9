"""A batch's way through objectives, updates and epochs, for every learner."""

from __future__ import annotations

import dataclasses
import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from relax_gym.learner import Learner
from relax_gym.types import Batch, Metrics, TrainingSample
from relax_gym_trainers.streaming import Stream, denominator
from relax_gym_trainers.torch_learner.objectives import Backend, Objective, Piece, shape
from relax_gym_trainers.torch_learner.optimizer import learning_rate
from relax_gym_trainers.torch_learner.options import LearnerOptions
from relax_gym_trainers.torch_learner.scores import by_group
from relax_gym_trainers.torch_learner.update import Part, Tally, check_sampled


@dataclass(slots=True, kw_only=True)
class Updates:
    """What a step's optimizer updates have found, one loss and one norm of the gradient for each."""

    tally: Tally = field(default_factory=Tally)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    parts: list[Part[Any]] = field(default_factory=list)
    streamed_tokens: int = 0


class PolicyLearner(Learner):
    """A step's batch is cut by groups into `updates_per_step` parts, one optimizer update each, gone through `epochs`
    times. An update's loss is aggregated over all trained tokens of its part, however that is cut into micro-batches
    and spread over processes.
    """

    options: LearnerOptions
    backend: Backend
    objectives: Sequence[Objective]
    """One for each `[[env]]`."""
    total_steps: int
    _stream: Stream | None = None

    @abstractmethod
    def apply(self, lr: float, *, imitation: bool = False) -> float:
        """One optimizer step with the gradient that was accumulated, which is dropped. Returns the norm it had.

        Imitation has an optimizer state of its own.

        Raises:
            TrainingError: the gradient is not finite; nothing has changed.
        """

    def step(self, batch: Batch) -> Metrics:
        """One step on the global batch. A batch without any gradient changes no weight. A KL is that to the model
        as it was before the first step, i.e. after the warm-up if there was one.

        Returns:
            `loss`, `grad_norm` (before clipping; means over the updates), `lr`, `updates`, `seconds`; `trained_tokens`
            of the batch, `padded_tokens` that one epoch's forward passes compute, pads included, `prefix_saved_tokens`
            that they need not, thanks to shared prompts; with `stream`, `streamed_tokens`, the trained ones whose
            gradient was there before the step. When something was trained also, as means over its tokens: `entropy`
            in nats, `ratio_mean` of π/π_old, `clip_fraction` (share of the tokens with an advantage that the algorithm
            gave no gradient), what KL, teachers and corrections add (`kl`, `kl_reward`, `opd_kl`, `teacher_logprob`,
            `correction_weight`, `correction_dropped`); and, for the tokens of the first update that were scored, whose
            number is `logprob_diff_tokens`, the gap between learner and sampler: `logprob_diff_mean`, `_max`, `_k3`,
            `_clipped`.

        Raises:
            TrainingError: loss, gradient or a log-prob of the sampler is not finite; the update that found it changed
                nothing.
        """
        started = time.perf_counter()
        check_sampled(batch.samples, step=self.version + 1)
        self.leave_warmup()
        lr = learning_rate(self.options, self.version, self.total_steps)
        done = self._finish_stream(batch.samples, lr) if self.options.stream else self._go_through(batch.samples, lr)
        for objective in self.objectives:
            objective.forget()
        tally = self.backend.merge(done.tally)
        self.version += 1
        return {
            "loss": float(np.mean(done.losses)) if done.losses else 0.0,
            "grad_norm": float(np.mean(done.norms)) if done.norms else 0.0,
            "lr": lr,
            "updates": float(len(done.losses)),
            "trained_tokens": float(batch.trained_tokens),
            "padded_tokens": float(sum(part.padded_tokens for part in done.parts)),
            "prefix_saved_tokens": float(sum(part.saved_tokens for part in done.parts)),
            "logprob_diff_tokens": float(tally.counts["logprob_diff_mean"]),
            **({"streamed_tokens": float(done.streamed_tokens)} if self.options.stream else {}),
            **tally.metrics(),
            "seconds": time.perf_counter() - started,
        }

    def prepare(self, samples: Sequence[TrainingSample]) -> None:
        """See `Learner.prepare`: log-probs of the reference, old log-probs, what teachers give as a reward, and with
        `stream` the gradients."""
        self.leave_warmup()
        for objective, own in self._by_objective(samples).items():
            objective.prepare([samples[index] for index in own], only=self._only_update)
        if self.options.stream:
            check_sampled(samples, step=self.version + 1)
            stream, self._stream = self._stream or self._begin_stream(), None  # nothing is left of one that fails
            self._add(stream, samples)
            self._stream = stream

    def imitate(self, batch: Batch, *, lr: float) -> Metrics:
        """One supervised step at the run's temperature. The first `step` drops its optimizer's state."""
        self._stream = None
        part = self.backend.plan(batch.samples, skip_flat=False, distiller=None)
        if not part.total_tokens:
            return {"loss": 0.0, "grad_norm": 0.0, "trained_tokens": 0.0}
        self.backend.begin()
        loss = self.backend.imitate(part, step=self.version + 1)
        return {"loss": loss, "grad_norm": self.apply(lr, imitation=True), "trained_tokens": float(part.total_tokens)}

    @abstractmethod
    def leave_warmup(self) -> None:
        """A step follows: drop what imitation needed. Idempotent."""

    @property
    def _only_update(self) -> bool:
        return self.options.updates_per_step * self.options.epochs == 1

    def _by_objective(self, samples: Sequence[TrainingSample]) -> dict[Objective, list[int]]:
        """Indices of the samples of each objective."""
        out: dict[Objective, list[int]] = {}
        for index, sample in enumerate(samples):
            out.setdefault(self.objectives[sample.mixture], []).append(index)
        return out

    def _go_through(self, samples: Sequence[TrainingSample], lr: float) -> Updates:
        """All updates of a step, each with the gradient of its whole part."""
        done = Updates()
        updates = self._plan(samples, done.tally)
        for _ in range(self.options.epochs):
            for pieces in updates:
                first = not done.losses
                self.backend.begin()
                done.losses.append(sum(self._accumulate(piece, done.tally, first=first) for piece in pieces))
                done.norms.append(self.apply(lr))
        done.parts += [piece.part for pieces in updates for piece in pieces]
        return done

    def _begin_stream(self) -> Stream:
        self.backend.begin()
        return Stream()

    def _add(self, stream: Stream, samples: Sequence[TrainingSample]) -> None:
        """Add up the gradients of samples of a batch whose other samples are not known yet."""
        for pieces in self._plan(samples, stream.tally):
            for piece in pieces:
                part = dataclasses.replace(piece.part, total_tokens=1, total_samples=1)
                alone = dataclasses.replace(piece, part=part)
                stream.loss += self._accumulate(alone, stream.tally, first=True)
                stream.parts.append(part)
        stream.samples += samples

    def _finish_stream(self, samples: Sequence[TrainingSample], lr: float) -> Updates:
        """The one update of a step, of whose samples some may have been added up before it."""
        stream, self._stream = self._stream or self._begin_stream(), None
        missing = stream.missing(samples)
        if missing is None:
            stream, missing = self._begin_stream(), list(samples)
        done = Updates(tally=stream.tally, parts=stream.parts, streamed_tokens=stream.trained_tokens)
        self._add(stream, missing)
        if stream.parts:
            factor = 1 / denominator(samples, self.objectives[0].algorithm)
            self.backend.scale(factor)
            done.losses.append(stream.loss * factor)
            done.norms.append(self.apply(lr))
        return done

    def _accumulate(self, piece: Piece, tally: Tally, *, first: bool) -> float:
        return self.backend.accumulate(piece, tally=tally, first=first, step=self.version + 1)

    def _plan(self, samples: Sequence[TrainingSample], tally: Tally) -> list[list[Piece]]:
        """The pieces of each optimizer update of an epoch; what has nothing to learn from is left out."""
        shaped = shape(samples, self._by_objective(samples), tally)
        only = self._only_update
        updates = []
        for update in split_by_group(shaped, self.options.updates_per_step):
            groups = self._by_objective(update).items()
            pieces = [objective.piece([update[i] for i in own], update, only=only) for objective, own in groups]
            updates.append([piece for piece in pieces if piece.part.micro_batches])
        return [pieces for pieces in updates if pieces]


def split_by_group(samples: Sequence[TrainingSample], parts: int) -> list[list[TrainingSample]]:
    """Cut samples into `parts` runs of whole groups, groups in order of appearance, sizes as equal as they can be."""
    ordered = by_group(samples)
    chunks = np.array_split(np.arange(len(ordered)), parts)
    return [[sample for index in chunk for sample in ordered[index]] for chunk in chunks]
