"""Episodes and samples → the flat numbers a run logs. Pure functions; the loop adds timings under time/ and perf/."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from relax_gym.types import FinishReason, Group, Metrics, TrainingSample, Trajectory

log = logging.getLogger("relax_gym")


def episode_metrics(trajectories: Sequence[Trajectory]) -> Metrics:
    """Rewards, lengths, endings and faults of some episodes. Means leave out episodes that could not be scored."""
    if not trajectories:
        return {}
    rewards = [t.reward for t in trajectories if t.reward is not None]
    count = len(trajectories)
    turns = [turn for t in trajectories for turn in t.turns]
    out: Metrics = {
        "episode/count": count,
        "episode/turns": len(turns) / count,
        "episode/tokens": sum(len(turn.completion.token_ids) for turn in turns) / count,
        "episode/errors": sum(t.error is not None for t in trajectories),
        "episode/unscored": count - len(rewards),
        "episode/empty_completions": sum(not turn.completion.token_ids for turn in turns),
        "episode/cut_completions": sum(turn.completion.finish_reason is FinishReason.LENGTH for turn in turns),
        "episode/new_segments": sum(turn.new_segment for turn in turns),
    }
    if rewards:
        out["reward/mean"] = float(np.mean(rewards))
        out["reward/std"] = float(np.std(rewards))
    out.update(_reward_parts(trajectories))
    for reason, times in Counter(t.stop_reason for t in trajectories).items():
        out[f"stop/{reason}"] = times / count
    return out


def merged(*parts: Metrics) -> Metrics:
    """All metrics together. A name that two parts use is logged as a warning: the later one hides the other."""
    out: Metrics = {}
    for part in parts:
        for name in sorted(out.keys() & part.keys()):
            log.warning(
                "metric %s is %g and %g in one step, and the latter is kept; a reward's metrics() and the other "
                "numbers of the mapping it returns share the names reward/<name>/<key>: rename one in the reward",
                name,
                out[name],
                part[name],
            )
        out |= part
    return out


def _reward_parts(trajectories: Sequence[Trajectory]) -> Metrics:
    parts: defaultdict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        for name, value in (*trajectory.rewards.items(), *trajectory.reward_parts.items()):
            if value is not None:
                parts[name].append(value)
    return {f"reward/{name}": float(np.mean(values)) for name, values in parts.items()}


def evaluation_metrics(trajectories: Sequence[Trajectory]) -> Metrics:
    """`evaluation_summary` as `eval/<key>`, and as `eval/<env id>/<key>` when there are several envs."""
    out = {f"eval/{key}": value for key, value in evaluation_summary(trajectories).items()}
    envs = sorted({t.task.env_id for t in trajectories})
    for env in envs if len(envs) > 1 else []:
        of_env = [t for t in trajectories if t.task.env_id == env]
        out.update({f"eval/{env}/{key}": value for key, value in evaluation_summary(of_env).items()})
    return out


def evaluation_summary(trajectories: Sequence[Trajectory]) -> Metrics:
    """`errors`, `turns`, `tokens`, `reward` if any could be scored, `accuracy` if envs report `info["correct"]`."""
    every = episode_metrics(trajectories)
    out = {"errors": every["episode/errors"], "turns": every["episode/turns"], "tokens": every["episode/tokens"]}
    if "reward/mean" in every:
        out["reward"] = every["reward/mean"]
    solved = accuracy(trajectories)
    return out if solved is None else {**out, "accuracy": solved}


def accuracy(trajectories: Sequence[Trajectory]) -> float | None:
    """The share of episodes that are solved, among those of envs that report `info["correct"]`; None if no env does.

    An episode counts by its last report. One that failed, or was cut before it could report, is not solved: leaving it
    out would show a model that runs out of turns or breaks its env as better than it is. The reward differs: it has no
    value for an episode that could not be scored, so its mean leaves those out and `errors` counts them.
    """
    reporting = {t.task.env_id for t in trajectories if t.info.get("correct") is not None}
    solved = [t.error is None and bool(t.info.get("correct")) for t in trajectories if t.task.env_id in reporting]
    return float(np.mean(solved)) if solved else None


def staleness_metrics(samples: Sequence[TrainingSample], version: int) -> Metrics:
    """How many versions behind `version` the trained tokens were sampled, and how many tokens for each lag."""
    lags = [version - sample.versions[sample.loss_mask == 1] for sample in samples]
    lag = np.concatenate(lags) if lags else np.zeros(0, dtype=np.int32)
    if lag.size == 0:
        return {}
    out: Metrics = {"staleness/mean": float(lag.mean()), "staleness/max": float(lag.max())}
    values, counts = np.unique(lag, return_counts=True)
    out.update({f"staleness/tokens_lag_{value}": float(n) for value, n in zip(values, counts, strict=True)})
    return out


def consumed_shares(groups: Sequence[Group], envs: Sequence[str]) -> Metrics:
    """Each env's share of the groups of a step, by their mixture's env ids; nothing if all are of one env."""
    counts = dict.fromkeys(envs, 0)
    for group in groups:
        counts[envs[group.mixture]] += 1
    if len(counts) == 1 or not groups:
        return {}
    return {f"queue/consumed_share/{env}": count / len(groups) for env, count in counts.items()}
