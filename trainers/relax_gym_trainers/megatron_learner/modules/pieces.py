"""Which keys the queries of a rank look at, whole rows or the chunks of the zigzag layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relax_gym_trainers.device import upload


class Alone:
    """A group of one rank."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Runs of this rank's queries, each with the keys it looks at; its queries are the last of these.

    Attributes:
        queries: Length of each run of queries.
        keys: Length of each run of keys.
        order: The rows of the keys gathered from all context-parallel ranks, [Σ keys], that make up the runs of keys.
            None: the keys of this rank are these runs.
        query_starts: Where each run begins and the last ends, int32 [runs + 1].
        key_starts: The same of the keys.
    """

    queries: list[int]
    keys: list[int]
    order: Tensor | None
    query_starts: Tensor
    key_starts: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], rows: int, group: Any, device: torch.device) -> Pieces:
        """The pieces of rows of those lengths, padding and the parts of all ranks included.

        Args:
            rows: Tokens of this rank.
            group: The context-parallel group.

        Raises:
            ValueError: the lengths do not add up to the ranks' tokens, or cannot be cut into the ranks' chunks.
        """
        ranks = group.size()
        lengths = [length for length in lengths if length]
        if sum(lengths) != rows * ranks:
            raise ValueError(
                f"rows of {sum(lengths)} tokens in all, but {ranks} ranks have {rows} each; pad the last row"
            )
        if ranks == 1:
            starts = _starts(lengths, device)
            return cls(lengths, lengths, None, starts, starts)
        for length in lengths:
            if length % (2 * ranks):
                raise ValueError(f"a row of {length} tokens: pad it to a multiple of 2 · cp = {2 * ranks}")
        chunks = [length // (2 * ranks) for length in lengths]
        seen = (group.rank() + 1, 2 * ranks - group.rank())  # chunks that this rank's two look at
        queries = [chunk for chunk in chunks for _ in seen]
        keys = [count * chunk for chunk in chunks for count in seen]
        order = torch.cat(
            [
                whole[: count * chunk]
                for chunk, whole in zip(chunks, _zigzag(chunks, rows, ranks), strict=True)
                for count in seen
            ]
        )
        return cls(queries, keys, upload(order.numpy(), device), _starts(queries, device), _starts(keys, device))


def keep_lengths(packed: Any, lengths: list[int]) -> None:
    """Say how long the rows of a pack (Megatron's `PackedSeqParams`) are: to read it off a device is to wait for it."""
    packed.lengths = lengths


def cut(packed: Any, rows: int, group: Any, device: torch.device) -> Pieces:
    """The pieces of a pack (Megatron's `PackedSeqParams`), kept with it: all layers need the same ones.

    Raises:
        ValueError: as `Pieces.of`.
    """
    kept: dict[Any, Pieces] = vars(packed).setdefault("pieces", {})
    where = (rows, group.size(), group.rank(), device)
    if where not in kept:
        lengths = vars(packed).get("lengths")
        if lengths is None:
            starts = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
            lengths = starts.diff().tolist()
        kept[where] = Pieces.of(lengths, rows, group, device)
    return kept[where]


def _zigzag(chunks: list[int], rows: int, ranks: int) -> list[Tensor]:
    """Of each row, where its tokens stand among all ranks' tokens, in their order.

    Rank r has the chunks r and 2 · ranks - 1 - r of each row, one after the other.
    """
    number = torch.arange(2 * ranks)
    rank = torch.minimum(number, 2 * ranks - 1 - number)
    second = (number >= ranks).long()
    begins = [0, *accumulate(2 * chunk for chunk in chunks)]
    return [
        (rank * rows + begin + second * chunk)[:, None].add(torch.arange(chunk)).flatten()
        for begin, chunk in zip(begins, chunks, strict=False)
    ]


def _starts(lengths: list[int], device: torch.device) -> Tensor:
    return upload(np.array([0, *accumulate(lengths)], dtype=np.int32), device)
