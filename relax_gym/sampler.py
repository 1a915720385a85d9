"""The sampler contract: token ids in; token ids, log-probs and policy versions out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from relax_gym.types import Completion, Placed

if TYPE_CHECKING:
    from torch import Tensor

Weights = Iterable[tuple[str, "Tensor"]]
"""Named tensors under their Hugging Face names, tied weights once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample one completion.

    `temperature` 0 means greedy. `top_k` 0, `top_p` 1 and `min_p` 0 mean off. `stop` strings may span tokens; the
    completion keeps every sampled id, the one that completed the stop string included. `logit_bias` is added to the
    logits before temperature. `seed` makes the completion depend on nothing but the prompt, weights and these values.

    The log-probs returned are those of the whole distribution with the logit bias at this temperature (at 1 when
    greedy): top-k, top-p and min-p choose tokens but do not change the number reported, so a learner can recompute it.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        if self.temperature < 0:
            raise ValueError(f"temperature is {self.temperature}; it must be 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be in (0, 1]")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is {self.min_p}; it must be in [0, 1]")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; it must be 0 (off) or more")


class Session(ABC):
    """The turns of one episode. A sampler may keep the episode's KV cache between calls until `close`."""

    @abstractmethod
    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, media: Sequence[Placed] = ()
    ) -> Completion:
        """Continue `prompt_ids` (the whole context, 1-D), in which `media` are placed in order. Cancelling the call
        aborts the request.

        Raises:
            SamplerError: the sampler cannot serve this request.
        """

    @abstractmethod
    def close(self) -> None:
        """Free what the sampler keeps for this episode. Idempotent; never blocks."""


class Sampler(ABC):
    """Where completions come from. One event loop uses it; `open_session` and `Session.close` never block."""

    @property
    @abstractmethod
    def version(self) -> int:
        """The policy version that new tokens are sampled with; -1 before the first `update_weights`."""

    @property
    @abstractmethod
    def max_context(self) -> int:
        """Most tokens (prompt and completion together) that one request may have."""

    @property
    def capacity(self) -> int | None:
        """Tokens (prompt and completion) of all requests together that there is memory for; None: no known limit.

        It may change, and is asked for as groups of episodes end: no more are begun than should fit.
        """
        return None

    @property
    def shares_devices(self) -> bool:
        """Whether it frees memory for the learner when it rests, and needs that again with new weights."""
        return False

    @abstractmethod
    async def start(self) -> None:
        """Load what is needed to serve. Called once."""

    @abstractmethod
    def open_session(self) -> Session:
        """Begin an episode."""

    @abstractmethod
    async def update_weights(self, weights: Weights, version: int) -> None:
        """Take new weights; stamp `version` only once all of them are in. Caches of older versions are dropped.

        `weights` can be read once and only until this returns, in another thread than the event loop's, as they are
        computed when they are asked for: a learner never has all of a large model at once.
        """

    async def rest(self) -> None:  # noqa: B027 # most samplers have nothing to free
        """No request comes until the next `update_weights`: free what the learner can use meanwhile."""

    @abstractmethod
    async def aclose(self) -> None:
        """Stop serving and free everything. Idempotent; also called when `start` failed or never came."""

    def metrics(self) -> Mapping[str, float]:
        """Counters since the last call (tokens, seconds, cache hits), for the run's metrics."""
        return {}
