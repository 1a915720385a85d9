"""Weights are filled into buckets, aligned, to the byte, and one bucket at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from sglang_weights_kit import awkward
from torch import Tensor

from relax_gym_plugins.samplers.sglang.weights.buckets import buckets


def sizes(weights: Sequence[tuple[str, Tensor]], limit: int, dtype: torch.dtype | None = None) -> list[Any]:
    return [([slot.name for slot in b.slots], b.nbytes, b.last) for b in buckets(weights, dtype, limit)]


def test_buckets_are_filled_to_the_byte() -> None:
    four = [(name, torch.zeros(2)) for name in "abcd"]
    assert sizes(four, 16) == [(["a", "b"], 16, False), (["c", "d"], 16, True)]
    assert sizes(four, 15) == [(["a"], 8, False), (["b"], 8, False), (["c"], 8, False), (["d"], 8, True)]
    assert sizes(four, 24) == [(["a", "b", "c"], 24, False), (["d"], 8, True)]
    assert sizes(four, 16, torch.bfloat16) == [(["a", "b", "c", "d"], 16, True)]


def test_a_tensor_larger_than_a_bucket_travels_alone() -> None:
    weights = [("a", torch.zeros(1)), ("big", torch.zeros(9)), ("b", torch.zeros(1))]
    assert sizes(weights, 8) == [(["a"], 4, False), (["big"], 36, False), (["b"], 4, True)]


def test_empty_tensors_never_make_a_bucket() -> None:
    none = torch.zeros(0, 3)
    weights = [("n1", none), ("a", torch.zeros(4)), ("n2", none), ("b", torch.zeros(4)), ("n3", none)]
    assert sizes(weights, 16) == [(["n1", "a", "n2"], 16, False), (["b", "n3"], 16, True)]
    with pytest.raises(ValueError, match="no weights to send"):
        list(buckets([("n", none)]))


def test_slots_are_aligned_without_gaps() -> None:
    (bucket,) = buckets(awkward().items())
    assert [slot.start % slot.dtype.itemsize for slot in bucket.slots] == [0] * len(bucket.slots)
    assert [slot.end for slot in bucket.slots][:-1] == [slot.start for slot in bucket.slots][1:]
    widths = [slot.dtype.itemsize for slot in bucket.slots]
    assert widths == sorted(widths, reverse=True)


def test_weights_are_looked_at_one_bucket_at_a_time() -> None:
    seen = []

    def produce() -> Iterator[tuple[str, Tensor]]:
        for name in "abcd":
            seen.append(name)
            yield name, torch.zeros(2)

    pending = buckets(produce(), None, 8)
    next(pending)
    assert seen == ["a", "b"]
