"""Groups of scored episodes → samples with advantages."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from relax_gym.algorithm import Algorithm, FloatArray
from relax_gym.errors import TrainingError
from relax_gym.registry import load
from relax_gym.trajectory import to_samples, with_advantage
from relax_gym.types import Group, TrainingSample, Trajectory

UNSCORED = "unscored"
RESERVED_KINDS = ("train", "eval", "queued", "late")
"""What episodes that no filter dropped are called on disk."""


def drop_reason(group: Group, algorithm: Algorithm) -> str | None:
    """Why a group is not worth training on, judged by its raw rewards; None when it is.

    Raises:
        TrainingError: the user's own filter returned something else than a reason or None, or a reserved word.
    """
    scored = group.rewards[~np.isnan(group.rewards)]
    if scored.size == 0:
        return UNSCORED
    if algorithm.filter_zero_variance and np.ptp(scored) == 0:
        return "zero_variance"
    if algorithm.filter_mean_range is not None:
        low, high = algorithm.filter_mean_range
        if scored.mean() < low:
            return "mean_below_range"
        if scored.mean() > high:
            return "mean_above_range"
    if algorithm.filter is None:
        return None
    reason = load(algorithm.filter)(group)
    if reason is not None and not (isinstance(reason, str) and reason):
        raise TrainingError(
            f"algorithm.filter {algorithm.filter!r} returned {reason!r}; it must return a reason (text) to drop the "
            "group, or None to keep it"
        )
    if reason in RESERVED_KINDS:
        raise TrainingError(
            f"algorithm.filter {algorithm.filter!r} returned {reason!r}, which is what episodes that were not dropped "
            f"are called on disk ({', '.join(RESERVED_KINDS)}); give the reason another name"
        )
    return reason


def batch_drop_reasons(groups: Sequence[Group], algorithms: Sequence[Algorithm]) -> list[str | None]:
    """Why each group of a step's batch is left out of it by `filter_quantiles`; None for those that stay.

    A group is compared with the n groups at hand that share its algorithm, `algorithms` having one for each `[[env]]`.
    With raw mean rewards m_0 ≤ … ≤ m_{n−1}, those below m_⌊low·n⌋ or above m_⌈high·n⌉₋₁ are left out: at most these
    shares, and of equal means all or none. It depends on the batch alone, not on what was played before.
    """
    reasons: list[str | None] = [None] * len(groups)
    for algorithm in {id(algorithm): algorithm for algorithm in algorithms}.values():
        own = [index for index, group in enumerate(groups) if algorithms[group.mixture] is algorithm]
        if algorithm.filter_quantiles is None or not own:
            continue
        means = np.array([np.nanmean(groups[index].rewards) for index in own])
        (low, high), ordered = algorithm.filter_quantiles, np.sort(means)
        least, most = ordered[math.floor(low * len(own))], ordered[math.ceil(high * len(own)) - 1]
        for index, mean in zip(own, means, strict=True):
            reasons[index] = "mean_below_quantile" if mean < least else "mean_above_quantile" if mean > most else None
    return reasons


def assign_credit(
    groups: Sequence[Group], algorithms: Sequence[Algorithm], *, whole: bool = True
) -> list[TrainingSample]:
    """All samples of the global batch; an episode's (or turn's) advantage stands at each of its trained tokens.

    `algorithms` has one for each `[[env]]`. What an algorithm does over the whole batch, it does over all samples of
    the envs that share it. With `kl_reward_coef` only the learner, who has the reference model, can finish the
    advantages: see `subtract_kl`; until then they are float64. Groups that are not the `whole` batch get
    advantages without what an algorithm does over it.
    """
    samples: list[TrainingSample] = []
    for algorithm in {id(algorithm): algorithm for algorithm in algorithms}.values():
        own = [group for group in groups if algorithms[group.mixture] is algorithm]
        samples += _assign_credit(own, algorithm, whole=whole or not algorithm.needs_batch)
    order = {group.group_id: index for index, group in enumerate(groups)}
    return sorted(samples, key=lambda sample: order[sample.group_id])


def _assign_credit(groups: Sequence[Group], algorithm: Algorithm, *, whole: bool) -> list[TrainingSample]:
    pairs = [pair for group in groups for pair in _credited(group, algorithm)]
    samples, advantages = [sample for sample, _ in pairs], [values for _, values in pairs]
    dtype = np.float64 if algorithm.kl_reward_coef else np.float32
    if whole and not algorithm.kl_reward_coef:
        advantages = _over_batch(samples, advantages, algorithm)
    return [with_advantage(sample, values, dtype=dtype) for sample, values in zip(samples, advantages, strict=True)]


def subtract_kl(
    samples: Sequence[TrainingSample], kl: Sequence[FloatArray], algorithm: Algorithm
) -> list[TrainingSample]:
    """A_t − kl_reward_coef · Σ_{s ≥ t} kl_s over the trained tokens of the episode, then the step over the whole batch.

    `samples` are all those of the global batch, an episode's segments in order; `kl` has one array [trained_tokens] for
    each. This is the policy gradient of reward − kl_reward_coef · KL: a token answers for all KL from itself on.
    """
    to_go: defaultdict[str, float] = defaultdict(float)
    advantages: list[FloatArray] = []
    for sample, values in zip(reversed(samples), reversed(kl), strict=True):
        sums = np.cumsum(values[::-1])[::-1] + to_go[sample.episode_id]
        to_go[sample.episode_id] += float(values.sum())
        own = sample.advantages[sample.loss_mask == 1]
        advantages.append(own - algorithm.kl_reward_coef * sums)
    final = _over_batch(samples, advantages[::-1], algorithm)
    return [with_advantage(sample, values) for sample, values in zip(samples, final, strict=True)]


def _credited(group: Group, algorithm: Algorithm) -> list[tuple[TrainingSample, FloatArray]]:
    """`_credit_group` without the samples that the algorithm leaves out."""
    pairs = _credit_group(group, algorithm)
    return [(sample, values) for sample, values in pairs if not algorithm.leaves_out_flat or values.any()]


def _credit_group(group: Group, algorithm: Algorithm) -> Iterator[tuple[TrainingSample, FloatArray]]:
    """Each sample with the advantage of each of its trained tokens."""
    for trajectory, by_turn in zip(group.trajectories, _turn_advantages(group, algorithm), strict=True):
        first = 0
        for sample in to_samples(trajectory, group.group_id):
            lengths = [end - start for start, end in sample.turn_spans]
            yield sample, np.repeat(by_turn[first : first + len(lengths)], lengths)
            first += len(lengths)


def _turn_advantages(group: Group, algorithm: Algorithm) -> list[FloatArray]:
    """For each episode the advantage of each of its turns."""
    rewards = algorithm.shaped_rewards(group)
    lengths = [len(trajectory.turns) for trajectory in group.trajectories]
    if algorithm.credit == "episode":
        return [np.full(n, advantage) for n, advantage in zip(lengths, algorithm.advantages(rewards), strict=True)]
    to_go = [
        _rewards_to_go(trajectory, reward, algorithm.discount)
        for trajectory, reward in zip(group.trajectories, rewards.tolist(), strict=True)
    ]
    return np.split(algorithm.advantages(np.concatenate(to_go)), np.cumsum(lengths)[:-1])


def _rewards_to_go(trajectory: Trajectory, reward: float, discount: float) -> FloatArray:
    """Discounted rewards from each turn on, [turns]; NaN for an episode that could not be scored.

    A turn's reward is what the env gave for it and what rewards give turn by turn; what the episode's reward has beyond
    that comes with the last turn.
    """
    steps = np.array([turn.reward or 0.0 for turn in trajectory.turns], dtype=np.float64)
    if not len(steps):
        return steps
    for values in trajectory.reward_turns.values():
        steps += values
    steps[-1] += reward - steps.sum()
    for turn in range(len(steps) - 2, -1, -1):
        steps[turn] += discount * steps[turn + 1]
    return np.full_like(steps, np.nan) if np.isnan(reward) else steps


def _over_batch(
    samples: Sequence[TrainingSample], advantages: Sequence[FloatArray], algorithm: Algorithm
) -> list[FloatArray]:
    """`algorithm.batch_advantages` over the tokens of scored episodes; the others keep out of it and get 0."""
    scored = [sample.reward is not None for sample in samples]
    final = [np.zeros_like(values) for values in advantages]
    inside = [values for values, ok in zip(advantages, scored, strict=True) if ok]
    if inside:
        together = algorithm.batch_advantages(np.concatenate(inside))
        parts = iter(np.split(together, np.cumsum([len(values) for values in inside])[:-1]))
        final = [next(parts) if ok else zeros for zeros, ok in zip(final, scored, strict=True)]
    return final
