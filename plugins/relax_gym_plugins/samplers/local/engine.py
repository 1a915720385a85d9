"""The continuous-batching engine: one thread that owns the model, the cache and all contexts."""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from relax_gym.errors import MediaError, SamplerError
from relax_gym.models import positions
from relax_gym.processing import MediaProcessor
from relax_gym.sampler import SamplingParams
from relax_gym.types import Completion, FinishReason, Placed
from relax_gym_plugins.samplers.local.contexts import Context, Request, Rows
from relax_gym_plugins.samplers.local.model import ModelRunner
from relax_gym_plugins.samplers.local.options import LocalSamplerOptions
from relax_gym_plugins.samplers.local.sampling import BatchParams, sample

logger = logging.getLogger("relax_gym")
LONG_WAIT_SECONDS = 30.0
SEED_STRIDE = 1_000_003
Outcomes = list[tuple[Future[Completion], Completion | SamplerError]]
COUNTERS = ("prefill_tokens", "cached_tokens", "generated_tokens", "steps", "busy_seconds", "wait_seconds")


class LocalEngine:
    """Serves contexts of one model. Every method may be called from any thread.

    With `options.deterministic`, a step is only taken while every open context has a request, so which requests share a
    batch does not depend on how long environments think. Contexts are then served in the order they were opened;
    open all that run side by side before the first of them asks for tokens.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        options: LocalSamplerOptions | None = None,
        *,
        seed: int = 0,
        processor: MediaProcessor | None = None,
    ) -> None:
        """Take `model` over: nothing else may use, train or copy it from now on.

        `tokenizer` is needed for stop strings only, `processor` for images, video and audio; `seed` is used for
        requests without one of their own.

        Raises:
            ConfigError: `max_context` is more than the model has positions.
            SamplerError: the model's attention is of a kind that the engine cannot batch.
        """
        self.options = options or LocalSamplerOptions()
        self.max_context = self.options.context_limit(positions(model.config))
        self.version = -1
        self._tokenizer, self._seed = tokenizer, seed
        self._runner = ModelRunner(model, processor, max_rows=self.options.max_slots, max_length=self.max_context)
        self._rows = Rows(self._runner.cache, self.options.max_slots)
        self._contexts: dict[int, Context] = {}
        self._orders, self._arrivals = itertools.count(), itertools.count()
        self._params: tuple[list[Request], BatchParams] | None = None
        self._steps = 0
        self._wake = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._futures: set[Future[Any]] = set()
        self._failure: SamplerError | None = None
        self._counters = dict.fromkeys(COUNTERS, 0.0)
        self._busy_total = self._wait_total = 0.0
        self._warned = False
        self._thread = threading.Thread(target=self._run, name="relax-gym-local-sampler", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def open(self) -> Context:
        """Begin a context. It counts as open until `close`."""
        with self._wake:
            context = Context(order=next(self._orders))
            self._inbox.append(lambda: self._contexts.update({context.order: context}))
            self._wake.notify()
        return context

    def close(self, context: Context) -> None:
        """End a context; a request it still has finishes as aborted. Idempotent."""
        with self._wake:
            self._inbox.append(lambda: self._close(context))
            self._wake.notify()

    def submit(
        self, context: Context, prompt_ids: Sequence[int], params: SamplingParams, media: Sequence[Placed] = ()
    ) -> Future[Completion]:
        """Ask for a completion. Cancelling the future aborts the request.

        Raises:
            SamplerError: the prompt or parameters cannot be served, or the engine is not running.
        """
        prompt = np.asarray(prompt_ids, dtype=np.int64)
        self._check(prompt, params)
        limit = min(params.max_new_tokens, self.max_context - len(prompt))
        future: Future[Completion] = Future()
        request = Request(
            prompt=prompt,
            media=tuple(media),
            params=params,
            limit=limit,
            arrival=next(self._arrivals),
            future=future,
        )
        self._post(lambda: self._begin(context, request), future)
        future.add_done_callback(lambda done: self._abort(context, request) if done.cancelled() else None)
        return future

    def update_weights(self, weights: Mapping[str, Tensor], version: int) -> Future[None]:
        """Take new weights between two steps. The tensors must stay unchanged until the future is done."""
        future: Future[None] = Future()
        self._post(lambda: self._update(weights, version, future), future)
        return future

    def stop(self) -> None:
        """Stop the thread and fail whatever is pending. Idempotent."""
        with self._wake:
            if self._failure is None:
                self._failure = SamplerError("the local sampler is closed; open a new one")
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()
        self._fail_pending()

    def metrics(self) -> dict[str, float]:
        """Counters since the last call."""
        with self._wake:
            taken, self._counters = self._counters, dict.fromkeys(COUNTERS, 0.0)
        return taken

    def _check(self, prompt: np.ndarray[Any, Any], params: SamplingParams) -> None:
        if not 1 <= len(prompt) <= self.max_context:
            raise SamplerError(
                f"the prompt has {len(prompt)} tokens; the local sampler takes 1 to {self.max_context} (max_context)"
            )
        ids = np.concatenate([prompt, np.fromiter(params.logit_bias, dtype=np.int64)])
        if ids.min() < 0 or ids.max() >= self._runner.vocab_size:
            wrong = next(int(i) for i in ids if not 0 <= i < self._runner.vocab_size)
            raise SamplerError(f"token id {wrong} is not in the model's vocabulary of {self._runner.vocab_size}")
        if params.stop and self._tokenizer is None:
            raise SamplerError(f"stop strings {params.stop!r} need a tokenizer; give the engine one")

    def _post(self, message: Callable[[], None], future: Future[Any]) -> None:
        with self._wake:
            if self._failure is not None:
                raise SamplerError(str(self._failure)) from self._failure.__cause__
            self._futures.add(future)
            self._inbox.append(message)
            self._wake.notify()

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._drain():
                    self._step()
        except BaseException as error:
            failure = SamplerError(f"the local sampler's engine crashed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            logger.exception("the local sampler's engine crashed")
            with self._wake:
                self._failure = failure
        self._fail_pending()

    def _fail_pending(self) -> None:
        with self._wake:
            pending, failure = list(self._futures), self._failure
            self._inbox.clear()
        for future in pending:
            error = SamplerError(str(failure))
            error.__cause__ = failure.__cause__ if failure else None
            self._resolve(future, error)

    def _drain(self) -> bool:
        """Handle messages until there is a step to take. False when the engine is to stop."""
        while True:
            with self._wake:
                begin, held = time.perf_counter(), any(c.request for c in self._contexts.values())
                while not (self._inbox or self._failure or self._runnable()):
                    if not self._wake.wait(LONG_WAIT_SECONDS) and held:
                        self._warn(time.perf_counter() - begin)
                if held:
                    self._count_wait(time.perf_counter() - begin)
                if self._failure is not None:
                    return False
                messages, self._inbox = self._inbox, deque()
            for message in messages:
                message()
            if not messages and self._runnable():
                return True

    def _runnable(self) -> bool:
        requests = [context.request is not None for context in self._contexts.values()]
        return bool(requests) and (all(requests) if self.options.deterministic else any(requests))

    def _count_wait(self, seconds: float) -> None:
        self._counters["wait_seconds"] += seconds
        self._wait_total += seconds
        if self._wait_total > max(self._busy_total, LONG_WAIT_SECONDS):
            self._warn(0.0)

    def _warn(self, seconds: float) -> None:
        if self._warned:
            return
        self._warned = True
        logger.warning(
            "the local sampler has spent %.0f s waiting for environments and %.0f s sampling (%d of %d open sessions "
            "have no request now); set deterministic=false in [sampler] to let other episodes go on meanwhile "
            "(reruns are then no longer bit-identical)",
            self._wait_total + seconds,
            self._busy_total,
            sum(context.request is None for context in self._contexts.values()),
            len(self._contexts),
        )

    def _begin(self, context: Context, request: Request) -> None:
        if request.future.cancelled():
            return
        if context.request is not None or context.order not in self._contexts:
            state = "already has a request in flight" if context.request else "is closed"
            self._resolve(request.future, SamplerError(f"the session {state}; open one session for each episode"))
            return
        try:
            context.begin(request, self._runner.positions(request.prompt, request.media))
        except MediaError as error:
            self._resolve(request.future, SamplerError(str(error)))
            return
        own = request.params.seed
        # Without a seed of its own, a request is as reproducible as the order of sessions and turns.
        default = (self._seed * SEED_STRIDE + context.order) * SEED_STRIDE + context.turns
        request.seed = (default if own is None else own) % 2**64
        if request.limit == 0:
            self._resolve(request.future, self._finish(context, FinishReason.LENGTH))

    def _abort(self, context: Context, request: Request) -> None:
        def forget() -> None:
            if context.request is request:
                context.request = None

        with self._wake:
            self._futures.discard(request.future)
            self._inbox.append(forget)
            self._wake.notify()

    def _close(self, context: Context) -> None:
        if context.request is not None:
            future = context.request.future
            self._resolve(future, self._finish(context, FinishReason.ABORT))
        if context.row is not None:
            self._rows.release(context.row)
        self._contexts.pop(context.order, None)

    def _update(self, weights: Mapping[str, Tensor], version: int, future: Future[None]) -> None:
        try:
            self._runner.load_weights(weights)
        except SamplerError as error:
            self._resolve(future, error)
            return
        for context in self._contexts.values():
            context.cached = 0
        self._runner.cache.clear()
        self.version = version
        self._resolve(future, None)

    def _step(self) -> None:
        """One forward: a prefill while there is any, else one more token for every active context."""
        begin = time.perf_counter()
        self._rows.admit(self._waiting())
        active = [c for c in self._contexts.values() if c.request is not None and c.row is not None]
        batch = self._rows.prefill_batch(active, self.options.prefill_tokens)
        if batch:
            logits = self._runner.prefill(batch)
        else:
            batch = [(context, 1) for context in self._rows.compact(active)]
            logits = self._runner.decode([context for context, _ in batch])
        computed = cached = 0
        for context, size in batch:
            request = context.request
            assert request is not None
            if not request.counted:
                cached, request.counted = cached + context.cached, True
            if size > 1 or not request.logprobs:
                computed += size
            context.cached += size
        ready = [index for index, (context, _) in enumerate(batch) if not context.missing]
        outcomes: Outcomes = []
        if ready:
            logits = logits if len(ready) == len(batch) else logits[ready]
            outcomes = self._choose([batch[index][0] for index in ready], logits)
        self._steps += 1
        self._count(computed, cached, len(ready), time.perf_counter() - begin)
        for future, outcome in outcomes:
            self._resolve(future, outcome)

    def _waiting(self) -> list[Context]:
        waiting = [c for c in self._contexts.values() if c.request is not None and c.row is None]
        if not self.options.deterministic:
            waiting.sort(key=lambda c: c.request.arrival if c.request else 0)
        return waiting

    def _choose(self, contexts: list[Context], logits: Tensor) -> Outcomes:
        """Sample a token for each context; returns the requests that are over."""
        requests = [context.request for context in contexts if context.request is not None]
        if self._params is None or self._params[0] != requests:
            chosen = BatchParams([r.params for r in requests], [r.seed for r in requests], self._runner.device)
            self._params = requests, chosen
        positions = np.array([context.length for context in contexts], dtype=np.uint64)
        tokens, logprobs = sample(logits, positions, self._params[1])
        outcomes: Outcomes = []
        for context, request, token, logprob in zip(contexts, requests, tokens, logprobs, strict=True):
            context.append(token)
            request.logprobs.append(logprob)
            request.versions.append(self.version)
            if math.isnan(logprob):
                context.request = None
                error = SamplerError("the model gives NaN; its weights or dtype are broken")
                outcomes.append((request.future, error))
            elif token in request.params.stop_token_ids or (request.params.stop and self._stopped(context, request)):
                outcomes.append((request.future, self._finish(context, FinishReason.STOP)))
            elif len(request.logprobs) == request.limit:
                outcomes.append((request.future, self._finish(context, FinishReason.LENGTH)))
        return outcomes

    def _stopped(self, context: Context, request: Request) -> bool:
        """Whether the newest token completes a stop string. Only the tail is decoded: a token has at least one byte."""
        assert self._tokenizer is not None
        tail = max(len(text.encode()) for text in request.params.stop) + 4
        start = max(context.length - tail, len(request.prompt))
        text = self._tokenizer.decode(context.ids[start : context.length].tolist(), clean_up_tokenization_spaces=False)
        return any(stop in text for stop in request.params.stop)

    def _finish(self, context: Context, reason: FinishReason) -> Completion:
        request = context.request
        assert request is not None
        context.request, context.touched = None, self._steps
        return Completion(
            token_ids=tuple(context.ids[len(request.prompt) : context.length].tolist()),
            logprobs=tuple(request.logprobs),
            versions=tuple(request.versions),
            finish_reason=reason,
        )

    def _resolve(self, future: Future[Any], outcome: Any) -> None:
        with self._wake:
            self._futures.discard(future)
        if not future.set_running_or_notify_cancel():
            return
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def _count(self, computed: int, cached: int, generated: int, seconds: float) -> None:
        with self._wake:
            self._busy_total += seconds
            for name, value in zip(COUNTERS, (computed, cached, generated, 1, seconds, 0), strict=True):
                self._counters[name] += value
