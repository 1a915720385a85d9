"""Megatron's parallel linears with low-rank adapters beside their weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, ModuleDict, Parameter
from torch.nn.functional import linear, pad

from relax_gym_trainers.megatron_learner import compat  # noqa: F401  (before megatron)
from relax_gym_trainers.megatron_learner.families.forms import Form, Sizes

from megatron.core.tensor_parallel import (  # isort: skip
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint  # isort: skip

CHILD = "adapters"


class Adapter(Module):
    """This rank's part of the A [rank, in] and B [out, rank] of one of the hub's modules."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.a, self.b = Parameter(a), Parameter(b)


@dataclass(frozen=True, slots=True)
class Lie:
    """How a linear holds the hub's modules `names`: their rows by `form`, with the sizes of this rank's share."""

    names: tuple[str, ...]
    form: Form
    sizes: Sizes


class Adapted(Module):
    """A linear that adds scale · B A x for each of the hub's modules in it that is adapted; plain until it has any.

    The A of fused modules are one matrix, one below the other, and their B one that is 0 elsewhere than in its module's
    rows: what is added is the product of two matrices, and so is what merging adds to the weight.
    """

    shared: tuple[str, int]
    """Which matrix of an adapter the tensor-parallel ranks share, and its dimension; each has all of the other."""
    weight: Tensor
    tp_group: Any
    sequence_parallel: bool

    def adapt(self, lie: Lie, weights: dict[str, tuple[Tensor, Tensor]], scale: float) -> None:
        """Add adapters, once: by name of the hub's module the whole A and B."""
        self.adapters, self._lie, self._scale = ModuleDict(), lie, scale
        parts = lie.form.join([torch.empty_like(self.weight, device="meta")], lie.sizes)
        self._rows = [len(part) for part in parts]
        name, dim = self.shared
        for module, (a, b) in weights.items():
            whole = {"a": a, "b": b}
            whole[name] = whole[name].chunk(self.tp_group.size(), dim)[self.tp_group.rank()]
            adapter = Adapter(**{key: value.to(self.weight, copy=True).contiguous() for key, value in whole.items()})
            for key, parameter in adapter.named_parameters():
                if key == name:
                    set_tensor_model_parallel_attributes(parameter, True, dim, 1)
                else:  # under sequence parallelism a rank's gradient is that of its tokens; Megatron adds them up
                    setattr(parameter, "sequence_parallel", self.sequence_parallel)  # noqa: B010
            self.adapters[module] = adapter

    def low_rank(self) -> tuple[Tensor, Tensor]:
        """This rank's A [n · rank, in] and scale · B [out, n · rank] of all n adapters."""
        adapters: dict[str, Any] = dict(self.adapters.items())
        a = torch.cat([adapter.a for adapter in adapters.values()])
        rank = len(a) // len(adapters)
        columns = dict(zip(adapters, range(0, len(a), rank), strict=True))
        blocks = [
            pad(adapters[name].b, (columns[name], len(a) - rank - columns[name]))
            if name in adapters
            else a.new_zeros(rows, len(a))
            for name, rows in zip(self._lie.names, self._rows, strict=True)
        ]
        b = self._lie.form.cut(blocks, torch.Size((len(self.weight), len(a))), 0, self._lie.sizes)
        return a, b * self._scale

    def merged(self) -> Tensor:
        """This rank's part of W + scale · B A, in the weight's dtype."""
        a, b = self.low_rank()
        return torch.addmm(self.weight.float(), b.float(), a.float()).to(self.weight.dtype)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """See Megatron's; of adapters the ranks share only one matrix."""
        plain = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        if not hasattr(self, CHILD):
            return plain
        name, dim = self.shared
        return plain | make_sharded_tensors_for_checkpoint(
            self.adapters.state_dict(keep_vars=True),
            f"{prefix}{CHILD}.",
            {f"{module}.{name}": dim for module in self.adapters},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


class AdaptedColumn(Adapted, ColumnParallelLinear):  # type: ignore[misc]
    """Rows of W, and so of B, on each rank."""

    shared = ("b", 0)

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Any:
        """As Megatron's."""
        out, bias = super().forward(x, *args, **options)
        if not hasattr(self, CHILD):
            return out, bias
        a, b = self.low_rank()
        low = linear(x, a)
        # The gradient of a rank's outputs is a part of that of x A, which the ranks add up here: it is far smaller
        # than x, and A's gradient follows from the sum.
        if self.sequence_parallel:
            low = gather_from_sequence_parallel_region(low, tensor_parallel_output_grad=True, group=self.tp_group)
        else:
            low = copy_to_tensor_model_parallel_region(low, group=self.tp_group)
        return out + linear(low, b), bias


class AdaptedRow(Adapted, RowParallelLinear):  # type: ignore[misc]
    """Columns of W, and so of A, on each rank."""

    shared = ("a", 1)

    def forward(self, x: Tensor) -> Any:
        """As Megatron's."""
        out, bias = super().forward(x)
        if not hasattr(self, CHILD):
            return out, bias
        a, b = self.low_rank()
        reduce = reduce_from_tensor_model_parallel_region
        if self.sequence_parallel:
            reduce = reduce_scatter_to_sequence_parallel_region
        return out + linear(reduce(linear(x, a), group=self.tp_group), b), bias


def of_adapter(name: str) -> bool:
    """Whether it is the name of an adapter's parameter."""
    return f".{CHILD}." in name


def changing(modules: Sequence[Module]) -> list[Parameter]:
    """Of models with adapters the adapters' parameters, of others all."""
    named = [pair for module in modules for pair in module.named_parameters()]
    return [p for name, p in named if of_adapter(name)] or [p for _, p in named]


def adapted(model: Module) -> Iterator[tuple[str, Adapted]]:
    """(name of the weight, its linear) of each that is adapted."""
    for name, module in model.named_modules():
        if isinstance(module, Adapted) and hasattr(module, CHILD):
            yield f"{name}.weight", module


def local(sizes: Sizes, ranks: int) -> Sizes:
    """Those of one tensor-parallel rank."""
    return replace(sizes, heads=sizes.heads // ranks, groups=sizes.groups // ranks)
