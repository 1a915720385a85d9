"""One optimizer update's gradient: micro-batches in, accumulated `.grad` out."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax_gym.algorithm import Algorithm, FloatArray, TrainedTokens
from relax_gym.errors import TrainingError
from relax_gym.types import Metrics, TrainingSample
from relax_gym_trainers.device import upload
from relax_gym_trainers.functional import kl_estimate, token_weights
from relax_gym_trainers.objective import correction_weight, mismatch, policy_loss
from relax_gym_trainers.torch_learner.distillation import Distiller
from relax_gym_trainers.torch_learner.optimizer import non_finite
from relax_gym_trainers.torch_learner.packing import IntArray, MicroBatch, pack
from relax_gym_trainers.torch_learner.policy import Policy


class Trained(Protocol):
    """What the loss needs of a micro-batch: N trained tokens of S samples; see `MicroBatch`."""

    @property
    def targets(self) -> IntArray: ...
    @property
    def sample(self) -> IntArray: ...
    @property
    def logprobs(self) -> NDArray[np.float32]: ...
    @property
    def advantages(self) -> NDArray[np.float32]: ...
    @property
    def token_counts(self) -> IntArray: ...
    @property
    def members(self) -> tuple[TrainingSample, ...]: ...


Packed = TypeVar("Packed", bound=Trained, covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part(Generic[Packed]):
    """What one update trains on, or one process's share of it. The totals are those of all its samples, the skipped
    ones included; `padded_tokens` and `saved_tokens` of all processes."""

    micro_batches: Sequence[Packed]
    total_tokens: int
    total_samples: int
    padded_tokens: int
    saved_tokens: int
    loss_weight: float = 1.0


def plan(
    samples: Sequence[TrainingSample],
    *,
    budget: int,
    share_prefix: bool,
    skip_flat: bool,
    pair_cost: float = 0.0,
    apart: Callable[[TrainingSample], object] | None = None,
) -> Part[MicroBatch]:
    """Pack samples for one update. `skip_flat` leaves out samples all of whose advantages are 0: no policy gradient.

    What is left out still counts in the totals, so skipping changes time, not the gradient. Samples of which `apart`
    says different things are never in one micro-batch.
    """
    trained = [sample for sample in samples if sample.trained_tokens]
    used = [s for s in trained if not skip_flat or s.advantages[s.loss_mask.astype(bool)].any()]
    kinds: dict[object, list[TrainingSample]] = {}
    for sample in used:
        kinds.setdefault(apart(sample) if apart else None, []).append(sample)
    micro_batches = [
        batch
        for kind in kinds.values()
        for batch in pack(kind, budget=budget, share_prefix=share_prefix, pair_cost=pair_cost)
    ]
    alone = sum(int(sample.loss_mask.nonzero()[0][-1]) for sample in used)
    return Part(
        micro_batches=micro_batches,
        total_tokens=sum(sample.trained_tokens for sample in trained),
        total_samples=len(trained),
        padded_tokens=sum(batch.padded_tokens for batch in micro_batches),
        saved_tokens=alone - sum(batch.real_tokens for batch in micro_batches),
    )


def check_sampled(samples: Sequence[TrainingSample], *, step: int) -> None:
    """Log-ratios are cut, so a log-prob that is not finite would not show in the loss.

    Raises:
        TrainingError: the sampler reported one for a trained token.
    """
    for sample in samples:
        reported = sample.logprobs[sample.loss_mask == 1]
        broken = reported[~np.isfinite(reported)]
        if broken.size:
            raise TrainingError(
                f"the sampler reported {broken[0]} as log-prob of a token that it sampled, in segment {sample.segment} "
                f"of episode {sample.episode_id!r} of step {step}; no weight has changed. The log-prob of a token "
                "that can be sampled is finite: check which one the sampler reports, its weights and its dtype"
            )


@dataclass(slots=True)
class Tally:
    """Means over tokens and maxima, collected over micro-batches.

    What a GPU computes stays there until `settle`: to read a number is to wait for everything before it.
    """

    sums: dict[str, Any] = field(default_factory=lambda: defaultdict(float))
    counts: dict[str, Any] = field(default_factory=lambda: defaultdict(int))
    maxima: dict[str, Any] = field(default_factory=dict)

    def mean(self, **values: Tensor) -> None:
        """Add tokens to the mean of each name."""
        for name, value in values.items():
            if value.numel():
                self.sums[name] += _settled(value.double().sum())
                self.counts[name] += value.numel()

    def share(self, name: str, value: Tensor, *, among: Tensor) -> None:
        """Add to the mean of a name the tokens `among` which it is taken, [N] bool as `value`."""
        self.sums[name] += _settled((value & among).sum(dtype=torch.float64))
        self.counts[name] += _settled(among.sum())

    def maximum(self, name: str, value: Tensor) -> None:
        """Take the largest of `value` and what was seen before."""
        if value.numel():
            highest = value.max()
            self.maxima[name] = torch.maximum(self.maxima[name], highest) if name in self.maxima else highest

    def settle(self) -> Tally:
        """Itself, with numbers for what was on devices."""
        for values in (self.sums, self.counts, self.maxima):
            values |= {name: value.item() for name, value in values.items() if isinstance(value, Tensor)}
        return self

    def __add__(self, other: Tally) -> Tally:
        """What both have seen; both are settled."""
        out = Tally(sums=defaultdict(float, self.sums), counts=defaultdict(int, self.counts), maxima={**self.maxima})
        for name, value in other.sums.items():
            out.sums[name] += value
            out.counts[name] += other.counts[name]
        for name, value in other.maxima.items():
            out.maxima[name] = max(out.maxima.get(name, value), value)
        return out

    def metrics(self) -> Metrics:
        """All of it by name."""
        self.settle()
        return {name: total / self.counts[name] for name, total in self.sums.items() if self.counts[name]} | self.maxima


def _settled(value: Tensor) -> Any:
    """A number where it costs no wait, else the value: what is on the CPU has no place in a sum on a GPU."""
    return value.item() if value.device.type == "cpu" else value


def score_all(policy: Policy, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
    """Log-probs without gradient, one tensor [N] for each micro-batch."""
    with torch.no_grad(), policy.autocast():
        return [policy.score(batch)[0] for batch in micro_batches]


def reward_kl(new: NDArray[Any], reference: NDArray[Any], algorithm: Algorithm) -> FloatArray:
    """The reward's KL to the reference at each of a sample's trained tokens, float64 [trained_tokens]."""
    ref = torch.from_numpy(reference)
    kl: FloatArray = kl_estimate(torch.from_numpy(new).to(ref), ref, algorithm.kl_reward_estimator).double().numpy()
    return kl


def accumulate_policy_gradient(
    policy: Policy,
    algorithm: Algorithm,
    part: Part[MicroBatch],
    *,
    old: Sequence[Tensor] | None,
    reference: Sequence[Tensor] | None,
    tally: Tally,
    first: bool,
    step: int,
    distiller: Distiller | None = None,
) -> float:
    """Add the gradient of the update's loss to `.grad` and return the loss.

    `old` are the log-probs the ratio is taken against, None for the policy as it is now; `reference` those of the
    frozen model, None without KL; one tensor for each micro-batch. `first` says that the weights still are those of the
    batch's version, so that what the sampler reported can be compared with what the learner computes. With a
    `distiller` no micro-batch may hold samples of two teachers.

    Raises:
        TrainingError: the loss is not finite, or a teacher's scores are missing.
    """
    total: float | Tensor = 0.0
    with policy.autocast():
        for index, batch in enumerate(part.micro_batches):
            logprobs, terms = _score(policy, algorithm, distiller, batch, tally)
            loss, pairs = differentiate(
                algorithm,
                part,
                batch,
                logprobs,
                terms,
                old=None if old is None else old[index],
                reference=None if reference is None else reference[index],
                tally=tally,
                first=first,
            )
            total = total + loss
            _backward(policy, pairs)
            del logprobs, terms, pairs  # or what their backward needs would outlive it into the next micro-batch
    return finite("loss", total, step)


def differentiate(
    algorithm: Algorithm,
    part: Part[Trained],
    batch: Trained,
    logprobs: Tensor,
    terms: Sequence[tuple[Tensor, float]],
    *,
    old: Tensor | None,
    reference: Tensor | None,
    tally: Tally,
    first: bool,
) -> tuple[Tensor, list[tuple[Tensor, Tensor | None]]]:
    """The loss of one micro-batch, float64, and tensors [N] each with the gradient of the loss against it, if any.

    The loss is a function of [N] numbers: differentiated apart from the model, its pieces can be looked at, and any
    backward can go on from here. `terms` are what else of each token is in the loss, [N], with a factor; for the others
    see `accumulate_policy_gradient`.
    """
    device = logprobs.device
    tokens = TrainedTokens(
        logprobs=logprobs.detach().requires_grad_(),
        old_logprobs=logprobs.detach() if old is None else upload(old, device).to(logprobs),
        rollout_logprobs=upload(batch.logprobs, device).to(logprobs),
        advantages=upload(batch.advantages, device).to(logprobs),
        sample=upload(batch.sample, device),
        num_samples=len(batch.token_counts),
    )
    weights = upload(_weights(algorithm, part, batch), device).to(logprobs)
    reference = None if reference is None else upload(reference, device).to(logprobs)
    loss, grad = _loss(algorithm, tokens, weights, reference, tally)
    for value, factor in terms:
        loss = loss + factor * (weights * value.detach()).sum().double()
    if first:
        _compare(algorithm, tokens, tally)
    return loss, [(logprobs, grad), *((value, factor * weights if factor else None) for value, factor in terms)]


def _score(
    policy: Policy, algorithm: Algorithm, distiller: Distiller | None, batch: MicroBatch, tally: Tally
) -> tuple[Tensor, list[tuple[Tensor, float]]]:
    """Log-probs [N], and what else of each token is in the loss, [N], with its factor."""
    if distiller is None or not distiller.as_loss:
        logprobs, entropy = policy.score(batch)
        terms = []
    else:
        logprobs, entropy, kl, teacher = distiller.score(policy, batch)
        tally.mean(opd_kl=kl.detach(), teacher_logprob=teacher)
        terms = [(kl, distiller.weight)]
    tally.mean(entropy=entropy.detach())
    return logprobs, [*terms, (entropy, -algorithm.entropy_coef)]


def _weights(algorithm: Algorithm, part: Part[Trained], batch: Trained) -> FloatArray:
    """Weight of each token in the loss, [N] float64."""
    each = token_weights(
        batch.token_counts,
        algorithm.aggregation,
        total_tokens=part.total_tokens,
        total_samples=part.total_samples,
        norm=algorithm.token_sum_norm,
    )
    weights: FloatArray = part.loss_weight * each[batch.sample]
    return weights


def _loss(
    algorithm: Algorithm, tokens: TrainedTokens, weights: Tensor, reference: Tensor | None, tally: Tally
) -> tuple[Tensor, Tensor]:
    """The policy and KL loss, float64, and its gradient against the log-probs, [N]."""
    with torch.autocast(weights.device.type, enabled=False):
        loss = (weights * policy_loss(algorithm, tokens)).sum()
        (grad,) = torch.autograd.grad(loss, tokens.logprobs)
        judged = tokens.advantages != 0
        tally.mean(ratio_mean=tokens.ratio.detach())
        tally.share("clip_fraction", grad == 0, among=judged)
        if algorithm.correction != "none" or algorithm.sequence_mask_delta is not None:
            weight = correction_weight(algorithm, tokens)
            tally.mean(correction_weight=weight, correction_dropped=weight == 0)
        if reference is not None:
            kl = kl_estimate(tokens.logprobs, reference, algorithm.kl_estimator)
            tally.mean(kl=kl.detach())
            kl_loss = algorithm.kl_coef * (weights * kl).sum()
            grad = grad + torch.autograd.grad(kl_loss, tokens.logprobs)[0]
            loss = loss + kl_loss
    return loss.detach().double(), grad


def _backward(policy: Policy, outputs: Sequence[tuple[Tensor, Tensor | None]]) -> None:
    """Backward from tensors with their gradients, but not through what has none."""
    used = [(output, grad) for output, grad in outputs if grad is not None]
    with torch.autocast(policy.device.type, enabled=False):
        torch.autograd.backward([output for output, _ in used], [grad for _, grad in used])


def _compare(algorithm: Algorithm, tokens: TrainedTokens, tally: Tally) -> None:
    gaps = mismatch(algorithm, tokens)
    tally.mean(**{f"logprob_diff_{name}": value for name, value in gaps.items()})
    tally.maximum("logprob_diff_max", gaps["mean"])


def accumulate_imitation_gradient(policy: Policy, part: Part[MicroBatch], *, step: int) -> float:
    """Add the gradient of the mean negative log-likelihood over all trained tokens to `.grad`; return that mean.

    Raises:
        TrainingError: the loss is not finite.
    """
    total: float | Tensor = 0.0
    with policy.autocast():
        for batch in part.micro_batches:
            logprobs, _ = policy.score(batch)
            total = total + imitation_loss(logprobs, part)
            uniform = torch.full_like(logprobs, -1 / part.total_tokens)
            _backward(policy, [(logprobs, uniform)])
    return finite("imitation loss", total, step)


def imitation_loss(logprobs: Tensor, part: Part[Trained]) -> Tensor:
    """A micro-batch's share of the mean negative log-likelihood over all trained tokens of the part, float64."""
    return -logprobs.detach().sum().double() / part.total_tokens


def finite(name: str, loss: float | Tensor, step: int) -> float:
    """The loss of an update as a number, once all of it is added up: on a GPU, when that has come so far.

    Raises:
        TrainingError: it is not finite.
    """
    value = float(loss)
    if not math.isfinite(value):
        raise TrainingError(non_finite(name, value, step))
    return value
