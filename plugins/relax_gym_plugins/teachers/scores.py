"""What goes to SGLang for a teacher's scores, and what must come back. Pure.

Source: `GenerateReqInput` and `input_token_logprobs`, `input_top_logprobs` of SGLang 0.5.15 to 0.5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from relax_gym.teacher import TeacherScores
from relax_gym.types import TrainingSample
from relax_gym_plugins.samplers.sglang.protocol import BadReply


def score_body(sample: TrainingSample, top_k: int) -> dict[str, Any]:
    """The request: read the whole sequence, sample nothing, log-probs from the first trained token on."""
    return {
        "input_ids": sample.token_ids.tolist(),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": _start(sample),
        "top_logprobs_num": top_k,
    }


def nothing_to_score(top_k: int) -> TeacherScores:
    """The scores of a sample without trained tokens."""
    none = np.zeros((0, top_k), dtype=np.float32)
    if not top_k:
        return TeacherScores(logprobs=none.sum(1))
    return TeacherScores(logprobs=none.sum(1), top_ids=none.astype(np.int64), top_logprobs=none)


def read_scores(reply: Any, sample: TrainingSample, top_k: int, vocabulary: int) -> TeacherScores:
    """The scores of the trained tokens. `vocabulary` is the number of ids that the policy has logits for.

    Raises:
        BadReply: the reply is not of this sequence, not whole, or names tokens that the policy does not have.
    """
    meta = reply.get("meta_info") if isinstance(reply, Mapping) else None
    if not isinstance(meta, Mapping):
        raise BadReply(f"the reply has no meta_info: {str(reply)[:200]}")
    start, rows = _start(sample), np.flatnonzero(sample.loss_mask) - _start(sample)
    expected = sample.token_ids[start:].tolist()
    entries = _rows(meta, "input_token_logprobs", len(expected))
    if [entry[1] for entry in entries] != expected:
        raise BadReply("the reply's input_token_logprobs are of other tokens than were sent")
    logprobs = _numbers("input_token_logprobs", [entries[row][0] for row in rows])
    if not top_k:
        return TeacherScores(logprobs=logprobs)
    top = _rows(meta, "input_top_logprobs", len(expected))
    likeliest = [top[row] for row in rows]
    if wrong := {len(row or ()) for row in likeliest} - {top_k}:
        raise BadReply(f"the reply has {wrong.pop()} likeliest tokens where {top_k} were asked for")
    ids = np.array([[entry[1] for entry in row] for row in likeliest], dtype=np.int64)
    if ids.max() >= vocabulary:
        raise BadReply(
            f"a likeliest token is {ids.max()}, but the model has logits for {vocabulary} ids only; give a smaller "
            "top_k, or a teacher whose vocabulary has no more rows"
        )
    return TeacherScores(
        logprobs=logprobs,
        top_ids=ids,
        top_logprobs=_numbers("input_top_logprobs", [[entry[0] for entry in row] for row in likeliest]),
    )


def _start(sample: TrainingSample) -> int:
    """The position whose log-prob comes first: servers leave out the first one, as it may have nothing before it."""
    return int(np.flatnonzero(sample.loss_mask)[0]) - 1


def _rows(meta: Mapping[str, Any], key: str, length: int) -> list[Any]:
    rows = meta.get(key)
    if not isinstance(rows, list) or len(rows) != length:
        found = f"{len(rows)} rows" if isinstance(rows, list) else "none"
        raise BadReply(f"the reply has {found} of {key} where {length} were asked for")
    return rows


def _numbers(key: str, values: list[Any]) -> Any:
    try:
        numbers = np.array(values, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise BadReply(f"the reply's {key} are no log-probs: {error}") from error
    if not np.isfinite(numbers).all():
        raise BadReply(f"the reply's {key} are not finite; the teacher's weights or dtype are broken")
    return np.minimum(numbers, 0.0)
