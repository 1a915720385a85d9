"""The data that flows through a run. Everything is frozen and checks its own lengths where it is built."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_gym.media.items import Media

Message = dict[str, Any]
"""`{"role": str, "content": str | list[part]}` in the Hugging Face chat form."""

Tool = dict[str, Any]
"""A JSON-schema function tool, `{"type": "function", "function": {...}}`."""


class FinishReason(StrEnum):
    """Why the sampler stopped a completion."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class StopReason(StrEnum):
    """Why an episode ended. Exactly one holds for every episode."""

    ENV_DONE = "env_done"
    ENV_TRUNCATED = "env_truncated"
    MAX_TURNS = "max_turns"
    TOKEN_BUDGET = "token_budget"
    LENGTH = "length"
    PROMPT_TOO_LONG = "prompt_too_long"
    TIMEOUT = "timeout"
    ABORT = "abort"
    ERROR = "error"

    @property
    def truncated(self) -> bool:
        """Whether something other than the task itself ended the episode."""
        return self is not StopReason.ENV_DONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """An image, video or audio clip in a sequence: the half-open range from its first placeholder token to its last."""

    media: Media
    start: int
    end: int

    def moved(self, offset: int) -> Placed:
        """The same item, so many tokens later."""
        return Placed(media=self.media, start=self.start + offset, end=self.end + offset)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What a sampler returns: ids, each one's log-prob at the sampling temperature, and the version that sampled it.

    `routed_experts` [n − 1, MoE layers, top_k] are the experts that a mixture-of-experts model chose for the n tokens
    of prompt and completion together; the last token was never fed back, so it has none.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: FinishReason
    routed_experts: NDArray[np.int32] | None = None

    def __post_init__(self) -> None:
        lengths = {len(self.token_ids), len(self.logprobs), len(self.versions)}
        if len(lengths) != 1:
            raise ValueError(
                f"completion is not one bundle: {len(self.token_ids)} token ids, {len(self.logprobs)} log-probs, "
                f"{len(self.versions)} versions; a sampler must return one of each per token"
            )
        if any(map(math.isnan, self.logprobs)):
            raise ValueError("completion has NaN log-probs; the sampler's model is broken (bad weights or dtype)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One exchange: what the env said, what was fed to the model since the last turn, and what the model answered.

    `context_ids` are the ids fed after the previous completion; when `new_segment` they are the whole prompt. `media`
    are the items in them. `reward` is None when the env never answered this turn.
    """

    observation: tuple[Message, ...]
    context_ids: tuple[int, ...]
    completion: Completion
    text: str
    action: str
    reward: float | None = None
    new_segment: bool = False
    media: tuple[Placed, ...] = ()
    info: Mapping[str, Any] = field(default_factory=dict)
    sample_seconds: float = 0.0
    env_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeError:
    """What went wrong in one episode, with all that is needed to reproduce it."""

    env_id: str
    seed: int
    turn: int
    message: str
    traceback: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What one group of episodes plays: env id, constructor kwargs, Gymnasium seed, reset options.

    `mixture` is the index of the `[[env]]` it comes from.
    """

    env_id: str
    seed: int
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] | None = None
    mixture: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One finished episode. `rewards` maps reward name to its weighted score; None in it means it could not score.

    `reward_failures` says why, for each name that is None in `rewards`. `reward_parts` are the other numbers of rewards
    that return a mapping, as `name/key`; they are logged and do not count. `reward_turns` has the weighted numbers of
    rewards that give one for each turn; their sums are in `rewards`. `seconds` is how long the episode took until its
    env was closed.
    """

    task: Task
    episode_id: str
    turns: tuple[Turn, ...]
    stop_reason: StopReason
    final_observation: tuple[Message, ...] = ()
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    reward_failures: Mapping[str, str] = field(default_factory=dict)
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    reward_turns: Mapping[str, Sequence[float]] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
    error: EpisodeError | None = None
    seconds: float = 0.0

    @property
    def env_return(self) -> float:
        """Sum of the rewards the env gave."""
        return float(sum(turn.reward or 0.0 for turn in self.turns))

    @property
    def reward(self) -> float | None:
        """Sum of the weighted scores, or None when the episode could not be scored."""
        scores = list(self.rewards.values())
        if not scores or any(score is None or not math.isfinite(score) for score in scores):
            return None
        return float(sum(score for score in scores if score is not None))

    @property
    def tool_log(self) -> list[dict[str, Any]]:
        """The tool calls that a `ToolEnv` answered, in order: the `turn` they were made in, and what it says of each.

        That is what the env did, and not what the model says it did.
        """
        return [{"turn": at, **call} for at, turn in enumerate(self.turns) for call in turn.info.get("tool_log", ())]

    @property
    def messages(self) -> list[Message]:
        """The whole conversation, the model's turns as assistant messages."""
        out: list[Message] = []
        for turn in self.turns:
            out += [*turn.observation, {"role": "assistant", "content": turn.text}]
        return out + list(self.final_observation)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingSample:
    """A token sequence the model really saw, ready for a learner.

    All arrays have length T. `loss_mask` is 1 where the policy sampled the token. `logprobs` are the sampler's, 0 where
    the mask is 0. `versions` is the policy version that sampled the token, -1 where the mask is 0. `turn_spans` are
    half-open [start, end) ranges of the sampled tokens, one for each turn. `advantages` is 0 where the mask is 0, and
    float64 as long as the learner has a KL to subtract from it and to whiten after that (`kl_reward_coef`).
    `routed_experts` [T − 1, MoE layers, top_k] is the sampler's choice of experts for each token but the last. `media`
    are in the order of their tokens, none of which is trained.
    """

    episode_id: str
    group_id: str
    env_id: str
    segment: int
    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.int8]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    advantages: NDArray[np.float32] | NDArray[np.float64]
    turn_spans: tuple[tuple[int, int], ...]
    turn_rewards: tuple[float, ...]
    reward: float | None
    stop_reason: StopReason
    mixture: int = 0
    routed_experts: NDArray[np.int32] | None = None
    media: tuple[Placed, ...] = ()

    def __post_init__(self) -> None:
        expected = self.token_ids.shape
        for name in ("loss_mask", "logprobs", "versions", "advantages"):
            shape = getattr(self, name).shape
            if shape != expected:
                raise ValueError(f"{name} has shape {shape}, token_ids {expected}; they must be equal")
        if sum(end - start for start, end in self.turn_spans) != int(self.loss_mask.sum()):
            raise ValueError("turn_spans do not cover exactly the tokens of loss_mask")
        if len(self.turn_spans) != len(self.turn_rewards):
            raise ValueError(f"{len(self.turn_spans)} turn spans but {len(self.turn_rewards)} turn rewards")
        if self.routed_experts is not None:
            rows, *rest = self.routed_experts.shape
            if rows != len(self.token_ids) - 1 or len(rest) != 2:
                raise ValueError(
                    f"routed_experts has shape {self.routed_experts.shape} for {len(self.token_ids)} tokens; it must "
                    "be [tokens - 1, layers, top_k]"
                )

    @property
    def trained_tokens(self) -> int:
        """Number of tokens the policy sampled here."""
        return int(self.loss_mask.sum())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """G finished episodes of one task. Group order equals sample index order.

    `attempt` counts the groups of its slot that a filter has dropped before.
    """

    group_id: str
    slot: int
    trajectories: tuple[Trajectory, ...]
    attempt: int = 0

    @property
    def mixture(self) -> int:
        """Index of the `[[env]]` its task comes from."""
        return self.trajectories[0].task.mixture

    @property
    def rewards(self) -> NDArray[np.float64]:
        """Shape [G]; NaN where an episode could not be scored."""
        return np.array([math.nan if t.reward is None else t.reward for t in self.trajectories], dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """What a learner trains on in one step, at policy version `version`."""

    version: int
    samples: Sequence[TrainingSample]

    @property
    def trained_tokens(self) -> int:
        """Number of tokens with loss mask 1 in the whole (global) batch."""
        return sum(sample.trained_tokens for sample in self.samples)


Metrics = dict[str, float]
