"""How tensors of a hub checkpoint lie in one Megatron parameter, cut for a tensor-parallel rank and joined again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Lazy(Protocol):
    """A tensor that is read only where it is sliced (safetensors' `get_slice`, or a tensor)."""

    def __getitem__(self, index: Any) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Sizes:
    """What forms need to know of a model."""

    heads: int
    groups: int
    head: int
    vocabulary: int


class Form(ABC):
    """Both ways are bit exact: `join` of all ranks' `cut` is what was cut."""

    @abstractmethod
    def cut(self, whole: Sequence[Lazy], shape: torch.Size, rank: int, sizes: Sizes) -> Tensor:
        """Rank `rank`'s part of the Megatron parameter; `shape` is that part's, reading no more of `whole` than it."""

    @abstractmethod
    def join(self, parts: Sequence[Tensor], sizes: Sizes) -> list[Tensor]:
        """All ranks' parts → the hub's tensors: copies, as a view would keep all that was gathered with it."""

    def numel(self, shape: torch.Size, ranks: int, sizes: Sizes) -> int:
        """Numbers in the hub's tensors, from the shape of a rank's part."""
        return shape.numel() * ranks


class Copied(Form):
    """Every rank has all of it."""

    def cut(self, whole: Sequence[Lazy], shape: torch.Size, rank: int, sizes: Sizes) -> Tensor:
        return whole[0][:]

    def join(self, parts: Sequence[Tensor], sizes: Sizes) -> list[Tensor]:
        return [parts[0].clone()]

    def numel(self, shape: torch.Size, ranks: int, sizes: Sizes) -> int:
        return shape.numel()


class Rows(Form):
    """Consecutive rows on each rank (output units)."""

    def cut(self, whole: Sequence[Lazy], shape: torch.Size, rank: int, sizes: Sizes) -> Tensor:
        return whole[0][rank * shape[0] : (rank + 1) * shape[0]]

    def join(self, parts: Sequence[Tensor], sizes: Sizes) -> list[Tensor]:
        return [torch.cat(list(parts))]


class Columns(Form):
    """Consecutive columns on each rank (input units)."""

    def cut(self, whole: Sequence[Lazy], shape: torch.Size, rank: int, sizes: Sizes) -> Tensor:
        return whole[0][:, rank * shape[1] : (rank + 1) * shape[1]]

    def join(self, parts: Sequence[Tensor], sizes: Sizes) -> list[Tensor]:
        return [torch.cat(list(parts), 1)]


class Vocabulary(Form):
    """Rows of tokens; where ranks do not divide the vocabulary, zeros follow it and are left out again."""

    def cut(self, whole: Sequence[Lazy], shape: torch.Size, rank: int, sizes: Sizes) -> Tensor:
        first = rank * shape[0]
        rows = whole[0][min(first, sizes.vocabulary) : min(first + shape[0], sizes.vocabulary)]
        return torch.cat([rows, rows.new_zeros(shape[0] - len(rows), shape[1])])

    def join(self, parts: Sequence[Tensor], sizes: Sizes) -> list[Tensor]:
        return [torch.cat(list(parts))[: sizes.vocabulary]]

    def numel(self, shape: torch.Size, ranks: int, sizes: Sizes) -> int:
        return sizes.vocabulary * shape[1]


class QueryKeyValue(Form):
    """q, k and v of the hub → each group's query heads, key head and value head, one group after the other."""

    def cut(self, whole: Sequence[Lazy], shape: torch.Size, rank: int, sizes: Sizes) -> Tensor:
        shared = sizes.heads // sizes.groups
        groups = shape[0] // ((shared + 2) * sizes.head)
        runs = []
        for tensor, heads in zip(whole, (shared, 1, 1), strict=True):
            rows = groups * heads * sizes.head
            runs.append(tensor[rank * rows : (rank + 1) * rows].reshape(groups, heads * sizes.head, *shape[1:]))
        return torch.cat(runs, 1).reshape(shape)

    def join(self, parts: Sequence[Tensor], sizes: Sizes) -> list[Tensor]:
        shared = sizes.heads // sizes.groups
        whole = torch.cat(list(parts))
        grouped = whole.view(sizes.groups, (shared + 2) * sizes.head, *whole.shape[1:])
        runs = torch.split(grouped, [shared * sizes.head, sizes.head, sizes.head], 1)
        return [run.reshape(-1, *whole.shape[1:]) for run in runs]


class GateUp(Form):
    """The hub's gate and up → each rank's rows of the gate, then of up."""

    def cut(self, whole: Sequence[Lazy], shape: torch.Size, rank: int, sizes: Sizes) -> Tensor:
        rows = shape[0] // 2
        return torch.cat([tensor[rank * rows : (rank + 1) * rows] for tensor in whole])

    def join(self, parts: Sequence[Tensor], sizes: Sizes) -> list[Tensor]:
        return [torch.cat(halves) for halves in zip(*(part.chunk(2) for part in parts), strict=True)]
