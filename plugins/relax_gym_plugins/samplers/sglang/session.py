"""One episode's requests: aborts and failures on the way, one completion at the end."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from relax_gym.errors import SamplerError
from relax_gym.sampler import SamplingParams, Session
from relax_gym.types import Completion, FinishReason, Placed
from relax_gym_plugins.samplers.sglang.engine import EngineError
from relax_gym_plugins.samplers.sglang.fleet import Member
from relax_gym_plugins.samplers.sglang.protocol import BadReply, Piece, parse, sampling_body
from relax_gym_plugins.samplers.sglang.wire_media import check_prompt

if TYPE_CHECKING:
    from relax_gym_plugins.samplers.sglang.sampler import SGLangSampler


@dataclass(slots=True)
class Partial:
    """What a completion has so far."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    experts: np.ndarray[Any, np.dtype[np.int32]] | None = None

    def take(self, piece: Piece, versions: Sequence[int]) -> None:
        """Add the tokens of a reply. Experts of tokens that were there before stay those they were sampled with."""
        self.ids += piece.token_ids
        self.logprobs += piece.logprobs
        self.versions += versions
        if piece.experts is not None:
            known = 0 if self.experts is None else len(self.experts)
            fresh = piece.experts[known:]
            self.experts = fresh if self.experts is None else np.concatenate([self.experts, fresh])

    def cut(self, length: int, prompt_tokens: int) -> None:
        """Keep so many tokens."""
        del self.ids[length:], self.logprobs[length:], self.versions[length:]
        if self.experts is not None:
            self.experts = self.experts[: prompt_tokens + length - 1]


class SGLangSession(Session):
    """Stays with one server as long as that serves, so that its prefix cache is hit turn after turn."""

    def __init__(self, sampler: SGLangSampler) -> None:
        self._sampler = sampler
        self._member: Member | None = None
        self._failed: Member | None = None  # the last request there has failed
        self._rank = 0
        self._interrupted = False  # whether the weights have changed under the last request

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, media: Sequence[Placed] = ()
    ) -> Completion:
        """See `Session.generate`. A request that a weight update or a failing server ends goes on with what is left of
        its budget; each token keeps the version that sampled it."""
        sampler = self._sampler
        prompt = list(map(int, prompt_ids))  # of numpy too
        sampler.check(prompt, params)
        partial, failures = Partial(), 0
        while True:
            before = len(partial.ids)
            try:
                finish = await self._ask(prompt, params, media, partial)
            except (EngineError, BadReply) as error:
                failures += 1
                if isinstance(error, EngineError) and error.refused:
                    raise
                if failures > sampler.options.retries:
                    raise SamplerError(f"a request failed {failures} times, the last time: {error}") from error
                continue
            failures += finish is FinishReason.ABORT and not self._interrupted
            if failures > sampler.options.retries:
                raise SamplerError(f"a request was aborted in the server {failures} times, and not from here")
            if before and params.stop and (length := sampler.stop_length(partial.ids, before, params.stop)):
                partial.cut(length, len(prompt))
                finish = FinishReason.STOP
            if finish is FinishReason.ABORT and len(partial.ids) >= params.max_new_tokens:
                finish = FinishReason.LENGTH
            if finish is not FinishReason.ABORT:
                return Completion(
                    token_ids=tuple(partial.ids),
                    logprobs=tuple(partial.logprobs),
                    versions=tuple(partial.versions),
                    finish_reason=finish,
                    routed_experts=sampler.expert_rows(partial.experts),
                )

    async def _ask(
        self, prompt: list[int], params: SamplingParams, media: Sequence[Placed], partial: Partial
    ) -> FinishReason:
        """One request for what is missing."""
        sampler, spent = self._sampler, len(partial.ids)
        # First, as it takes time, in which weights may change.
        ids, encoded = await sampler.media.request(prompt + partial.ids, media)
        await sampler.open.wait()
        async with sampler.fleet.lease(self._member, avoid=self._failed) as member:
            self._keep(member)
            version, outages, rid = sampler.version, member.outages, uuid.uuid4().hex
            body = {
                "rid": rid,
                "input_ids": ids,
                "sampling_params": sampling_body(params, spent=spent),
                "return_logprob": True,
                "logprob_start_len": -1,
                **encoded,
                **({"return_routed_experts": True} if sampler.options.routed_experts else {}),
                **({"routed_dp_rank": self._rank} if member.engine.dp_size > 1 else {}),
                **({"extra_key": str(version)} if sampler.options.on_update == "keep" else {}),
            }
            try:
                reply = await member.engine.generate(body, timeout=sampler.options.request_timeout)
                piece = parse(
                    reply,
                    prompt_tokens=len(prompt) + spent,
                    asked=params.max_new_tokens - spent,
                    experts=sampler.options.routed_experts,
                )
                check_prompt(reply, prompt + partial.ids)
                versions = sampler.read_versions(piece, asked_at=version)
                _check_allowed(piece, params)
            except asyncio.CancelledError:
                sampler.spawn(member.engine.abort(rid))
                raise
            except (EngineError, BadReply) as error:
                named = error if isinstance(error, EngineError) else BadReply(f"{member.engine}: {error}")
                self._failed = member
                await sampler.failed(member, named)
                raise named from error.__cause__
            if member.outages != outages:
                raise EngineError(f"{member.engine} was taken out before it answered; it may hold broken weights")
            self._failed = None
            partial.take(piece, versions)
            sampler.count(member, piece, prompt_tokens=len(prompt) + spent)
            self._interrupted = sampler.version != version or not sampler.open.is_set()
            return piece.finish

    def _keep(self, member: Member) -> None:
        if member is not self._member:
            self.close()
            self._member = member
            self._rank = member.take_session()

    def close(self) -> None:
        """See `Session.close`."""
        if self._member is not None:
            self._member.leave_session(self._rank)
            self._member = None


def _check_allowed(piece: Piece, params: SamplingParams) -> None:
    """A placeholder of media that was sampled would stand for an image that is not there."""
    for id, bias in params.logit_bias.items():
        if bias == -math.inf and id in piece.token_ids:
            raise BadReply(f"the server sampled {id}, which its logit bias rules out")
