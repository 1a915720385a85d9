"""The kit for testing envs, rewards and whatever drives them: no model, no GPU, no torch.

`check_env` and `check_reward` check contracts; `ScriptedSampler` and `RecordingLearner` stand in for the expensive
parts of a run and keep a record of what they were asked. `SimulatedLoop`, `SimulatedEngine` and `SimulatedLearner` run
the real loop in simulated time.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from relax_gym.conformance import CheckResult, assert_env, check_env
from relax_gym.errors import ModelError, SamplerError
from relax_gym.learner import Learner
from relax_gym.reward_conformance import check_reward
from relax_gym.sampler import Sampler, SamplingParams, Session, Weights
from relax_gym.simulation import SimulatedEngine, SimulatedLoop, heavy_tailed
from relax_gym.types import Batch, Completion, FinishReason, Metrics, Placed, TrainingSample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = [
    "CheckResult",
    "RecordingLearner",
    "ScriptedRequest",
    "ScriptedSampler",
    "SimulatedEngine",
    "SimulatedLearner",
    "SimulatedLoop",
    "assert_env",
    "check_env",
    "check_reward",
    "heavy_tailed",
    "tiny_tokenizer",
]

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"


def tiny_tokenizer(extra_special: Sequence[str] = (), chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer built in code: one token for each UTF-8 byte, so any text survives the round trip.

    Ids 0, 1, 2 are `<|endoftext|>` (padding), `<|im_start|>` and `<|im_end|>` (end of sequence); `extra_special` tokens
    follow, then the 256 bytes. The chat template is ChatML with tools unless another is given.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from relax_gym.tiny_models import CHAT_TEMPLATE

    special = [PAD, START, END, *extra_special]
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped: PreTrainedTokenizerFast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START, *extra_special],
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = chat_template or CHAT_TEMPLATE
    return wrapped


class Encoder(Protocol):
    """The part of a tokenizer that scripted replies need."""

    eos_token_id: Any

    def encode(self, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        """Token ids of a text."""
        ...


Reply = str | Sequence[int] | Completion | Exception
"""A text (its tokens and the end-of-sequence token are the completion), exact token ids, a completion, or an error."""

Script = Callable[[Sequence[int], SamplingParams, int], Reply]
"""(prompt ids, params, turn of the session) → reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedRequest:
    """One call of `generate`: which session (in order of opening), which of its turns, and what it was asked."""

    session: int
    turn: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    media: tuple[Placed, ...] = ()


class ScriptedSampler(Sampler):
    """Answers with given replies. Every token has log-prob -0.5 and the version of the last `update_weights`.

    A completion longer than `max_new_tokens` is cut there with finish reason LENGTH.

    Args:
        replies: what every session answers turn by turn, or a function that decides.
        tokenizer: encodes replies that are text; `tiny_tokenizer()` by default.
        max_context: most tokens of prompt and completion together.
        delay: turns of the event loop that a request takes, for tests of concurrency.
        keep_requests: whether `requests` records every call.
    """

    def __init__(
        self,
        replies: Sequence[Reply] | Script,
        *,
        tokenizer: Encoder | None = None,
        max_context: int = 4096,
        delay: int = 0,
        keep_requests: bool = True,
    ) -> None:
        self.tokenizer: Encoder = tokenizer if tokenizer is not None else tiny_tokenizer()
        self.delay = delay
        self.requests: list[ScriptedRequest] = []
        self.started = 0
        self.opened = 0
        self.closed_sessions = 0
        self.cancelled = 0
        self.closed = False
        self.published: list[int] = []
        self._script = replies if callable(replies) else _turn_by_turn(list(replies))
        self._max_context = max_context
        self._keep_requests = keep_requests
        self._served = 0

    @property
    def version(self) -> int:
        """The last published version, -1 before the first."""
        return self.published[-1] if self.published else -1

    @property
    def max_context(self) -> int:
        """As given."""
        return self._max_context

    @property
    def open_sessions(self) -> int:
        """Sessions that nobody has closed yet."""
        return self.opened - self.closed_sessions

    async def start(self) -> None:
        """Counted in `started`."""
        self.started += 1

    def open_session(self) -> Session:
        """Counted in `opened`."""
        if self.closed:
            raise SamplerError("the sampler is closed; open sessions before aclose()")
        self.opened += 1
        return _ScriptedSession(self, self.opened - 1)

    async def update_weights(self, weights: Weights, version: int) -> None:
        """Read all weights, then note the version in `published`."""
        for _ in weights:
            await asyncio.sleep(0)
        self.published.append(version)

    async def aclose(self) -> None:
        """Refuse further sessions."""
        self.closed = True

    def metrics(self) -> Mapping[str, float]:
        """Requests served since the last call."""
        served, self._served = self._served, 0
        return {"requests": float(served)}

    async def reply(self, request: ScriptedRequest) -> Completion:
        """The completion for one request."""
        if self._keep_requests:
            self.requests.append(request)
        try:
            for _ in range(self.delay):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        room = self._max_context - len(request.prompt_ids)
        if room < 1:
            raise SamplerError(f"the prompt has {len(request.prompt_ids)} tokens; max_context is {self._max_context}")
        reply = self._script(request.prompt_ids, request.params, request.turn)
        if isinstance(reply, Exception):
            raise reply
        self._served += 1
        if isinstance(reply, Completion):
            return reply
        return self._completion(reply, min(request.params.max_new_tokens, room))

    def _completion(self, reply: str | Sequence[int], limit: int) -> Completion:
        if isinstance(reply, str):
            ids = [*self.tokenizer.encode(reply, add_special_tokens=False), self.tokenizer.eos_token_id]
        else:
            ids = list(reply)
        kept = tuple(ids[:limit])
        return Completion(
            token_ids=kept,
            logprobs=(-0.5,) * len(kept),
            versions=(self.version,) * len(kept),
            finish_reason=FinishReason.STOP if len(kept) == len(ids) else FinishReason.LENGTH,
        )


class _ScriptedSession(Session):
    def __init__(self, sampler: ScriptedSampler, index: int) -> None:
        self._sampler = sampler
        self._index = index
        self._turn = 0
        self._closed = False

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, media: Sequence[Placed] = ()
    ) -> Completion:
        if self._closed:
            raise SamplerError(f"session {self._index} is closed; open a new one for each episode")
        turn, self._turn = self._turn, self._turn + 1
        request = ScriptedRequest(session=self._index, turn=turn, prompt_ids=tuple(prompt_ids), params=params)
        return await self._sampler.reply(request)

    def close(self) -> None:
        self._sampler.closed_sessions += not self._closed
        self._closed = True


def _turn_by_turn(replies: Sequence[Reply]) -> Script:
    def script(prompt_ids: Sequence[int], params: SamplingParams, turn: int) -> Reply:
        if turn >= len(replies):
            raise SamplerError(f"the script has {len(replies)} replies, but a session asked for turn {turn}")
        return replies[turn]

    return script


class RecordingLearner(Learner):
    """Learns nothing and keeps every batch: `batches` from `step`, `imitated` from `imitate`.

    Args:
        metrics: what every `step` and `imitate` returns.
        weights: what `weights()` gives; nothing by default.
    """

    _WEIGHTS, _STATE = "recording_learner.json", "recording_learner_state.json"

    def __init__(self, *, metrics: Mapping[str, float] | None = None, weights: Weights = ()) -> None:
        self.version = 0
        self.batches: list[Batch] = []
        self.imitated: list[Batch] = []
        self.closed = 0
        self._metrics = dict(metrics) if metrics is not None else {"loss": 0.0}
        self._weights = tuple(weights)

    def step(self, batch: Batch) -> Metrics:
        """Keep the batch and count a version."""
        self.batches.append(batch)
        self.version += 1
        return dict(self._metrics)

    def imitate(self, batch: Batch, *, lr: float) -> Metrics:
        """Keep the batch."""
        self.imitated.append(batch)
        return dict(self._metrics)

    def weights(self) -> Weights:
        """The weights it was given."""
        return iter(self._weights)

    def export(self, folder: Path) -> None:
        """Write the version, which is all it has learned."""
        _write_version(folder / self._WEIGHTS, self.version)

    def save_state(self, folder: Path) -> None:
        """Write the version as the state."""
        _write_version(folder / self._STATE, self.version)

    def load(self, folder: Path) -> None:
        """Take the version back. Raises ModelError when `export` and `save_state` wrote different ones, or nothing."""
        exported, state = (_read_version(folder / name) for name in (self._WEIGHTS, self._STATE))
        if exported != state:
            raise ModelError(f"{folder} holds weights of version {exported} and state of version {state}")
        self.version = state

    def close(self) -> None:
        """Counted in `closed`."""
        self.closed += 1


class SimulatedLearner(RecordingLearner):
    """Takes `step_seconds(batch)` of a loop's simulated time for a step, and `group_seconds` for each group: in the
    step, or before it where the group was prepared."""

    def __init__(
        self, loop: SimulatedLoop, step_seconds: Callable[[Batch], float], *, group_seconds: float = 0.0
    ) -> None:
        super().__init__()
        self._loop, self._step_seconds, self._group_seconds = loop, step_seconds, group_seconds
        self._prepared: set[str] = set()

    def prepare(self, samples: Sequence[TrainingSample]) -> None:
        """Sleep."""
        groups = {sample.group_id for sample in samples}
        self._prepared |= groups
        if self._group_seconds:
            self._loop.sleep(self._group_seconds * len(groups))

    def step(self, batch: Batch) -> Metrics:
        """Sleep, then keep the batch."""
        left = {sample.group_id for sample in batch.samples} - self._prepared
        self._prepared.clear()
        self._loop.sleep(self._step_seconds(batch) + self._group_seconds * len(left))
        return super().step(batch)


def _write_version(path: Path, version: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"version": version}))


def _read_version(path: Path) -> int:
    if not path.is_file():
        raise ModelError(f"{path} is missing; load() reads what export() and save_state() wrote")
    return int(json.loads(path.read_text())["version"])
