"""The parameters of one rank, what the optimizer has of each, and where in the whole model it belongs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from relax_gym.errors import TrainingError
from relax_gym_trainers.megatron_learner import compat, hf  # noqa: F401  (compat before megatron)
from relax_gym_trainers.megatron_learner.checkpoint_files import Region, Stored
from relax_gym_trainers.megatron_learner.modules.adapters import changing
from relax_gym_trainers.megatron_learner.optimizer import parts

from megatron.core import parallel_state  # isort: skip
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory  # isort: skip

WEIGHT, REFERENCE, MOMENTS = "weight", "reference", ("exp_avg", "exp_avg_sq")
Shards = Any
"""Megatron's `ShardedTensor` or `ShardedTensorFactory`."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter of this rank, and what the optimizer has of it here: `main`, float32, the flattened parameter's
    `span`. `main` is None where other ranks of `group` have all of it."""

    parameter: Tensor
    shards: Shards
    main: Tensor | None
    span: slice
    optimizer: Any
    group: Any

    @property
    def identity(self) -> tuple[str, ...]:
        """The same for the same part of the model on any rank."""
        return tuple(shard.name for shard, _ in regions(self.shards, torch.empty_like(self.parameter, device="meta")))

    def pieces(self) -> dict[str, Tensor]:
        """What there is here of the weight and its moments, flat."""
        if self.main is None:
            return {}
        state = self.optimizer.state.get(self.main, {}) if self.optimizer else {}
        found = {WEIGHT: self.main, **{name: state[name] for name in MOMENTS if name in state}}
        return {name: tensor.detach().flatten() for name, tensor in found.items()}


def regions(shards: Shards, value: Tensor, kind: str = "") -> list[tuple[Region, Tensor]]:
    """Where in the whole model the parts of a parameter, or of what is shaped like it, belong."""
    if isinstance(shards, ShardedTensorFactory):
        built = replace(shards, data=value).build()
    else:
        built = [replace(shards, data=value, dtype=value.dtype)]
    out = []
    for shard in built:
        size = (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
        key = f"{kind}.{shard.key}" if kind else shard.key
        region = Region(key, tuple(shard.global_shape), tuple(shard.global_offset), size)
        out.append((region, shard.data.reshape(size)))
    return out


def slots(chunks: Sequence[Any], optimizer: Any) -> list[Slot]:
    """Every parameter of this rank that is `changing`, in that order. Without an `optimizer` they are all frozen."""
    owners = _owners(optimizer) if optimizer is not None else {}
    metadata = {
        "singleton_local_shards": False,
        "non_homogeneous_layers": True,  # adapters may be in some layers only
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    out = []
    kept = {id(parameter) for parameter in changing(chunks)}
    for chunk in chunks:
        model = hf.unwrapped(chunk)
        sharded = model.sharded_state_dict(metadata=metadata)
        for name, parameter in model.named_parameters():
            if id(parameter) not in kept:
                continue
            if not isinstance(sharded.get(name), ShardedTensor | ShardedTensorFactory):
                raise TrainingError(f"{type(model).__name__} does not say how {name} is cut among ranks; this is a bug")
            whole = slice(0, parameter.numel())
            owner = owners.get(id(parameter), (parameter, whole, None, None))
            out.append(Slot(parameter, sharded[name], *owner))
    return out


def _owners(optimizer: Any) -> dict[int, tuple[Tensor | None, slice, Any, Any]]:
    """By the id of a trained parameter: what is optimized of it here, which span that is, by what, shared by whom."""
    out: dict[int, tuple[Tensor | None, slice, Any, Any]] = {}
    for one in parts(optimizer):
        if getattr(one, "is_stub_optimizer", False):
            continue
        inner, spans = one.optimizer, getattr(one, "model_param_group_index_map", None)
        if spans is not None:  # the distributed optimizer
            for parameter in (parameter for buffer in one.buffers for parameter in buffer.param_index_map):
                out[id(parameter)] = (None, slice(0, 0), inner, one.data_parallel_group)
            for parameter, (group, order) in spans.items():
                span = one._get_model_param_range_map(parameter)["param"]
                main = inner.param_groups[group]["params"][order]
                out[id(parameter)] = (main, slice(span.start, span.end), inner, one.data_parallel_group)
            continue
        for parameter in _whole(one):
            out[id(parameter)] = (getattr(parameter, "main_param", parameter), slice(0, parameter.numel()), inner, None)
    return out


def _whole(one: Any) -> Iterator[Tensor]:
    """The model's parameters of an optimizer that is not distributed."""
    if hasattr(one, "float16_groups"):
        groups = [*one.float16_groups, *one.fp32_from_fp32_groups]
    else:
        groups = [group["params"] for group in one.optimizer.param_groups]
    for group in groups:
        yield from group


def fill(slot: Slot, stored: Stored) -> None:
    """The weight of a parameter, and the optimizer's copy of it."""
    weight = read(slot, stored, WEIGHT)
    slot.parameter.detach().copy_(weight)
    if slot.main is not None:
        slot.main.detach().view(-1).copy_(weight.flatten()[slot.span])


def read(slot: Slot, stored: Stored, kind: str) -> Tensor:
    """Whole, on the CPU."""
    blank = torch.empty(slot.parameter.shape, device="cpu")
    found = [
        stored.read(region).reshape(part.shape[-blank.dim() :]) for region, part in regions(slot.shards, blank, kind)
    ]
    if isinstance(slot.shards, ShardedTensorFactory):
        merged: Tensor = slot.shards.merge_fn(found)
        return merged
    return found[0].reshape(slot.parameter.shape)


def set_moments(slot: Slot, moments: dict[str, Tensor], step: int) -> None:
    main, inner = slot.main, slot.optimizer
    assert main is not None
    state = {name: value.to(main.device).reshape(main.shape).clone() for name, value in moments.items()}
    group = next(group for group in inner.param_groups if any(one is main for one in group["params"]))
    if isinstance(inner, torch.optim.Adam):  # AdamW is one
        on_device = group.get("fused") or group.get("capturable")
        state["step"] = torch.tensor(float(step), device=slot.parameter.device if on_device else "cpu")
    else:  # Transformer Engine's and Apex's count for a whole group
        group["step"] = step
    inner.state[main] = state


def may_be_padded(shards: Shards) -> bool:
    return bool(getattr(shards, "allow_shape_mismatch", False))
