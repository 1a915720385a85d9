"""What goes to SGLang's `/generate` and what must come back. Pure: nothing here does input or output.

Source: `GenerateReqInput`, `SamplingParams` and `TokenizerManager` of SGLang 0.5.15 to 0.5.23.
"""

from __future__ import annotations

import base64
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_gym.errors import SamplerError
from relax_gym.sampler import SamplingParams
from relax_gym.types import FinishReason


class BadReply(SamplerError):
    """A reply that cannot be trained on: something is missing, of unequal length, or not a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Tokens of one reply. `versions` are the weight versions as the server spells them, None where it does not say;
    `last` is the version it had at the end, which all servers say."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[str | None, ...]
    finish: FinishReason
    last: str | None = None
    cached_tokens: int = 0
    experts: NDArray[np.int32] | None = None


def sampling_body(params: SamplingParams, *, spent: int = 0) -> dict[str, Any]:
    """`sampling_params`, with `spent` tokens of the budget gone.

    Everything that SGLang has a default for is given, as a server may prefer other ones.
    """
    return {
        "max_new_tokens": params.max_new_tokens - spent,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        "min_p": params.min_p,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "min_new_tokens": 0,
        "n": 1,
        "stop": list(params.stop),
        "stop_token_ids": list(params.stop_token_ids),
        "logit_bias": {str(id): max(bias, -1e9) for id, bias in params.logit_bias.items()},
        "skip_special_tokens": False,
        "no_stop_trim": True,
        **({} if params.seed is None else {"sampling_seed": params.seed}),
    }


def parse(reply: Any, *, prompt_tokens: int, asked: int, experts: bool = False) -> Piece:
    """Check a reply as one bundle.

    Args:
        prompt_tokens: tokens of the prompt, media expanded.
        asked: `max_new_tokens` of the request.
        experts: whether `routed_experts` must be there.

    Raises:
        BadReply: naming what is missing or does not fit.
    """
    ids, meta = _member(reply, "output_ids", list), _member(reply, "meta_info", dict)
    finish = _finish(meta)
    entries = meta.get("output_token_logprobs")
    if entries is None:
        if ids or finish is not FinishReason.ABORT:
            raise BadReply("the reply has no output_token_logprobs, though return_logprob was asked for")
        entries = []
    logprobs, named = _split(entries)
    if named != ids:
        raise BadReply(
            f"the reply has {len(ids)} output_ids and log-probs of {len(named)} tokens, which must be the same"
        )
    if len(ids) > asked:
        raise BadReply(f"the reply has {len(ids)} tokens, but max_new_tokens was {asked}")
    if not ids and finish is not FinishReason.ABORT:
        raise BadReply(f"the reply is empty but ended with {finish.value!r}")
    queued = finish is FinishReason.ABORT and "prompt_tokens" not in meta  # servers say less of requests that waited
    if queued and experts:
        ids, logprobs = [], []
        meta = {**meta, "weight_versions": None}
    if ids and not queued and (read := meta.get("prompt_tokens")) != prompt_tokens:
        raise BadReply(
            f"the server read {read} prompt tokens where {prompt_tokens} were counted here; is its model, its "
            "processor or its media configuration another one?"
        )
    return Piece(
        token_ids=tuple(ids),
        logprobs=tuple(logprobs),
        versions=_versions(meta, len(ids)),
        finish=finish,
        last=meta.get("weight_version"),
        cached_tokens=int(meta.get("cached_tokens") or 0),
        experts=_experts(meta, prompt_tokens + len(ids) - 1) if experts and ids else None,
    )


def _member(reply: Any, key: str, kind: type) -> Any:
    value = reply.get(key) if isinstance(reply, Mapping) else None
    if not isinstance(value, kind):
        raise BadReply(f"the reply has no {key}: {str(reply)[:200]}")
    return value


def _finish(meta: Mapping[str, Any]) -> FinishReason:
    reason = meta.get("finish_reason")
    reason = reason if isinstance(reason, Mapping) else {}
    kind = reason.get("type")
    if kind not in ("stop", "length", "abort"):
        raise BadReply(f"the reply's finish_reason is {dict(reason)}; stop, length and abort are known")
    if kind == "abort" and reason.get("status_code"):  # the server gave up, nobody asked it to
        raise BadReply(f"the server aborted the request: {reason.get('message')} ({reason['status_code']})")
    if kind == "stop" and isinstance(reason.get("matched"), str) and "NaN" in reason["matched"]:
        raise BadReply("the server's logits are not numbers; its weights are broken")
    return FinishReason(kind)


def _split(entries: list[Any]) -> tuple[list[float], list[int]]:
    """Log-probs and ids out of `output_token_logprobs`. Single entries are looked at only when something is wrong."""
    try:
        values, ids = [entry[0] for entry in entries], [entry[1] for entry in entries]
        sound = {*map(type, ids)} <= {int} and math.isfinite(sum(values)) and max(values, default=0.0) <= 1e-3
    except (TypeError, IndexError, KeyError):
        sound = False
    if not sound:
        raise BadReply(next(fault for at, entry in enumerate(entries) if (fault := _fault(entry, at))))
    return [min(value, 0.0) for value in values], ids


def _fault(entry: Any, at: int) -> str | None:
    if not isinstance(entry, list | tuple) or len(entry) < 2 or type(entry[1]) is not int:
        return f"output_token_logprobs[{at}] is {entry!r}; it must be [log-prob, token id, text]"
    if not isinstance(entry[0], int | float) or not math.isfinite(entry[0]) or entry[0] > 1e-3:
        return f"the log-prob of token {at} is {entry[0]!r}, not a number below 0; its weights or dtype are broken"
    return None


def _versions(meta: Mapping[str, Any], length: int) -> tuple[str | None, ...]:
    """One for each token: of its span, or None when there are no spans (SGLang before 0.5.20)."""
    spans = meta.get("weight_versions")
    if spans is None:
        return (None,) * length
    out: list[str | None] = []
    for span in spans:
        start, end = int(span["start"]), int(span["end"])
        if start != len(out):
            raise BadReply(f"weight_versions {spans} do not follow each other")
        out += itertools.repeat(str(span["version"]), end - start)
    if len(out) != length:
        raise BadReply(f"weight_versions cover {len(out)} tokens, the reply has {length}")
    return tuple(out)


def _experts(meta: Mapping[str, Any], rows: int) -> NDArray[np.int32]:
    """[rows, layers * top_k], as the server sends them; its model says how many layers."""
    text = meta.get("routed_experts")
    if not isinstance(text, str):
        raise BadReply("the reply has no routed_experts; launch the server with enable_return_routed_experts = true")
    flat = np.frombuffer(base64.b64decode(text), dtype="<i4").astype(np.int32)
    if not rows or flat.size % rows:
        raise BadReply(f"routed_experts has {flat.size} numbers, which is no multiple of {rows} tokens")
    return flat.reshape(rows, -1)
