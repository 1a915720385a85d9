"""Requests to `/generate` and replies from it: one bundle, or a clear error."""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np
import pytest

from relax_gym.sampler import SamplingParams
from relax_gym.types import FinishReason
from relax_gym_plugins.samplers.sglang.protocol import BadReply, parse, sampling_body


def reply(ids: list[int] | None = None, **meta: Any) -> dict[str, Any]:
    ids = [4, 5, 6] if ids is None else ids
    known: dict[str, Any] = {
        "finish_reason": {"type": "stop", "matched": 6},
        "prompt_tokens": 10,
        "completion_tokens": len(ids),
        "output_token_logprobs": [[-0.5 * id, id, None] for id in ids],
        "weight_versions": [{"version": "3", "start": 0, "end": len(ids)}],
    }
    kept = {key: value for key, value in {**known, **meta}.items() if value is not None}
    return {"text": "", "output_ids": ids, "meta_info": kept}


def read(given: Any, **options: Any) -> Any:
    return parse(given, **{"prompt_tokens": 10, "asked": 8, **options})


def test_a_good_reply() -> None:
    piece = read(reply(cached_tokens=7))
    assert piece.token_ids == (4, 5, 6)
    assert piece.logprobs == (-2.0, -2.5, -3.0)
    assert piece.versions == ("3", "3", "3")
    assert piece.finish is FinishReason.STOP
    assert piece.cached_tokens == 7
    assert piece.experts is None


def test_spans_give_each_token_its_version() -> None:
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 3}]
    assert read(reply(weight_versions=spans)).versions == ("3", "4", "4")
    assert read(reply(weight_versions=None)).versions == (None, None, None)


def test_aborted_requests_may_have_nothing() -> None:
    abort = {"type": "abort", "message": "Abort in waiting queue", "status_code": None}
    piece = read(reply([], finish_reason=abort, output_token_logprobs=None, weight_versions=None))
    assert (piece.token_ids, piece.logprobs, piece.versions, piece.finish) == ((), (), (), FinishReason.ABORT)
    assert read(reply(finish_reason=abort)).token_ids == (4, 5, 6)


GAP = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 2, "end": 3}]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("Internal Server Error", "has no output_ids"),
        ({"output_ids": [1]}, "has no meta_info"),
        ({"text": "a", "meta_info": {}}, "has no output_ids"),
        (reply(output_token_logprobs=None), "no output_token_logprobs, though return_logprob was asked for"),
        (reply(output_token_logprobs=[[-1.0, 4, None]]), "3 output_ids and log-probs of 1 tokens"),
        (reply(output_token_logprobs=[[-1.0, id, None] for id in (4, 6, 5)]), "which must be the same"),
        (reply(output_token_logprobs=[[None, 4, None], [-1.0, 5, None], [-1.0, 6, None]]), "token 0 is None"),
        (reply(output_token_logprobs=[[math.nan, 4, None], [-1.0, 5, None], [-1.0, 6, None]]), "token 0 is nan"),
        (reply(output_token_logprobs=[[-1.0, 4], [0.5, 5], [-1.0, 6]]), "token 1 is 0.5"),
        (reply(output_token_logprobs=[-1.0, -1.0, -1.0]), r"output_token_logprobs\[0\] is -1.0"),
        (reply([], output_token_logprobs=[]), "empty but ended with 'stop'"),
        (reply(finish_reason={"type": "tired"}), "finish_reason is {'type': 'tired'}; stop, length and abort"),
        (reply(finish_reason={"type": "abort", "message": "Out of memory", "status_code": 500}), "Out of memory .500"),
        (reply(finish_reason={"type": "stop", "matched": "NaN happened"}), "logits are not numbers"),
        (reply(prompt_tokens=11), "read 11 prompt tokens where 10 were counted"),
        (reply(list(range(9))), "9 tokens, but max_new_tokens was 8"),
        (reply(weight_versions=GAP), "do not follow each other"),
        (reply(weight_versions=GAP[:1]), "cover 1 tokens, the reply has 3"),
    ],
)
def test_k29_k30_k37_replies_that_are_no_whole_bundle_are_errors(given: Any, message: str) -> None:
    with pytest.raises(BadReply, match=message):
        read(given)


def test_k41_experts_are_of_every_token_but_the_last() -> None:
    numbers = np.arange(12 * 6, dtype="<i4")
    sent = base64.b64encode(numbers.tobytes()).decode()
    assert read(reply(routed_experts=sent), experts=True).experts.tolist() == numbers.reshape(12, 6).tolist()
    with pytest.raises(BadReply, match="enable_return_routed_experts"):
        read(reply(), experts=True)
    with pytest.raises(BadReply, match="71 numbers, which is no multiple of 12 tokens"):
        read(reply(routed_experts=base64.b64encode(numbers[1:].tobytes()).decode()), experts=True)


def test_every_sampling_parameter_is_given() -> None:
    params = SamplingParams(
        max_new_tokens=20, temperature=0.7, top_p=0.9, stop=("\n",), stop_token_ids=(2,), logit_bias={7: -math.inf}
    )
    body = sampling_body(params, spent=5)
    assert body["max_new_tokens"] == 15
    assert (body["temperature"], body["top_p"], body["top_k"], body["min_p"]) == (0.7, 0.9, -1, 0.0)
    assert (body["stop"], body["stop_token_ids"]) == (["\n"], [2])
    assert body["logit_bias"] == {"7": -1e9}  # JSON has no infinity
    assert (body["repetition_penalty"], body["frequency_penalty"], body["min_new_tokens"]) == (1.0, 0.0, 0)
    assert "sampling_seed" not in body
