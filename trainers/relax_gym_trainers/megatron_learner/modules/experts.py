"""The experts of a rank in two grouped matrix products, instead of a loop over experts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from relax_gym.errors import ConfigError
from relax_gym_trainers.megatron_learner import compat  # noqa: F401  (before megatron)
from relax_gym_trainers.megatron_learner.modules.grouped import grouped_linear

from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory  # isort: skip
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl  # isort: skip
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes  # isort: skip
from megatron.core.transformer.module import MegatronModule  # isort: skip

_STACKED = ("mlp.experts.linear_fc1.weight", "mlp.experts.linear_fc2.weight")


class GroupedExperts(MegatronModule):  # type: ignore[misc]
    """Gated feed-forward experts, for Megatron's `experts` in place of `SequentialMLP`, with the same results.

    The weights of a rank's experts are one parameter each: `linear_fc1.weight` [experts, 2 · ffn / etp, hidden] (gate,
    then up) and `linear_fc2.weight` [experts, hidden, ffn / etp]. `unstacked` gives them under the names of
    `SequentialMLP`'s. The tensors of a checkpoint are the same; only `SequentialMLP` wants its empty `_extra_state`s.
    Every rank starts from the same random numbers: load weights.

    Raises:
        ConfigError: the config asks for biases, no gate, or what else only `SequentialMLP` has.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: Any,
        submodules: Any = None,
        pg_collection: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(config=config)
        _check(config)
        self.num_local_experts = num_local_experts
        self.ep_group, self.tp_group, self.dp_group = pg_collection.ep, pg_collection.expt_tp, pg_collection.expt_dp
        whole, ranks = config.moe_ffn_hidden_size, self.tp_group.size()
        if whole % ranks:
            raise ConfigError(f"etp = {ranks} does not divide the {whole} hidden units of an expert; change it")
        width = whole // ranks
        self.linear_fc1 = _Stacked(config, (num_local_experts, 2 * width, config.hidden_size), 1, config.init_method)
        self.linear_fc2 = _Stacked(
            config, (num_local_experts, config.hidden_size, width), 2, config.output_layer_init_method
        )

    def forward(
        self, hidden: Tensor, tokens_per_expert: Tensor, probabilities: Tensor, **unused: Any
    ) -> tuple[Tensor, None]:
        """Tokens sorted by expert, [T, hidden], with their weights, [T] → [T, hidden], a part of it where etp > 1."""
        counts = tokens_per_expert.tolist()
        gates = grouped_linear(hidden, self.linear_fc1.weight, counts)
        return grouped_linear(self._activate(gates, probabilities[:, None]), self.linear_fc2.weight, counts), None

    def _activate(self, gates: Tensor, weights: Tensor) -> Tensor:
        activation = self.config.activation_func
        if self.config.bias_activation_fusion and activation is torch.nn.functional.silu:
            fused: Tensor = weighted_bias_swiglu_impl(gates, None, weights)
            return fused
        gate, up = gates.chunk(2, -1)
        weighted: Tensor = activation(gate) * up * weights
        return weighted.to(gates.dtype)

    def backward_dw(self) -> None:
        """Nothing is left of the backward pass."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The tensors of a checkpoint, as those of `SequentialMLP`: [.., all experts, rows, columns] each."""
        if (metadata or {}).get("singleton_local_shards"):
            raise ConfigError(
                "singleton_local_shards = True keeps experts apart; GroupedExperts has them in one tensor"
            )
        axes = len(sharded_offsets)
        ep = (axes, self.ep_group.rank(), self.ep_group.size())
        replica = (0, 0, self.dp_group.rank())

        def part(key: str, data: Tensor, axis: int, number: int, parts: int, replica: Any) -> ShardedTensor:
            offsets = (*sharded_offsets, ep, (axes + axis, number, parts))
            return ShardedTensor.from_rank_offsets(
                key, data.contiguous(), *offsets, replica_id=replica, prepend_axis_num=axes
            )

        rank, ranks = self.tp_group.rank(), self.tp_group.size()

        def halves(key: str, data: Tensor, replica: Any, flattened_range: Any = None) -> list[ShardedTensor]:
            """Gate and up apart, as the whole has all ranks' gates first."""
            return [
                part(key, half, 1, number * ranks + rank, 2 * ranks, replica)
                for number, half in enumerate(data.chunk(2, 1))
            ]

        first, second = self.linear_fc1.weight, self.linear_fc2.weight
        key = f"{prefix}experts.linear_fc1.weight"
        return {
            f"{prefix}linear_fc1.weight": ShardedTensorFactory(key, first, halves, _joined, replica),
            f"{prefix}linear_fc2.weight": part(key.replace("fc1", "fc2"), second, 2, rank, ranks, replica),
        }


class _Stacked(torch.nn.Module):
    """A weight for each expert, cut along `dim` for the ranks that share it."""

    def __init__(self, config: Any, shape: tuple[int, int, int], dim: int, initialise: Any) -> None:
        super().__init__()
        device = torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=dim, stride=1)
        # Whether its gradient is summed over all data-parallel ranks, or over those that have the same experts.
        same = config.expert_tensor_parallel_size == config.tensor_model_parallel_size
        self.weight.allreduce = config.expert_model_parallel_size == 1 and same  # type: ignore[attr-defined]
        if config.perform_initialization:
            initialise(self.weight)


@torch.no_grad()
def _joined(halves: list[Tensor]) -> Tensor:
    return torch.cat(halves, 1)


def unstacked(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Named parameters with those of `GroupedExperts` as `SequentialMLP` has them: one for each local expert, under
    `…mlp.experts.local_experts.{number}.linear_fc1.weight`, a view of the stacked one; the others as they are.
    """
    for name, parameter in named:
        if not name.endswith(_STACKED):
            yield name, parameter
            continue
        for number, weight in enumerate(parameter.detach()):
            yield name.replace("mlp.experts.", f"mlp.experts.local_experts.{number}."), weight


def use_grouped(mlp: Any) -> None:
    """Make the `mlp` of a layer of Megatron's local spec, which has experts, use `GroupedExperts`."""
    submodules_of(mlp).experts = GroupedExperts


def submodules_of(mlp: Any) -> Any:
    """What the `mlp` of a layer of Megatron's local spec is made of: it is a `partial` from 0.19."""
    return mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules


def _check(config: Any) -> None:
    wrong = {
        "add_bias_linear = True": config.add_bias_linear,
        "gated_linear_unit = False": not config.gated_linear_unit,
        "moe_apply_probs_on_input = True": config.moe_apply_probs_on_input,
        "glu_linear_offset other than 0": getattr(config, "glu_linear_offset", 0.0),
        "activation_func_clamp_value": getattr(config, "activation_func_clamp_value", None) is not None,
        "moe_latent_size": getattr(config, "moe_latent_size", None) is not None,
        "fp8 or fp4": getattr(config, "fp8", None) or getattr(config, "fp4", None),
    }
    if found := [option for option, is_wrong in wrong.items() if is_wrong]:
        raise ConfigError(f"grouped experts do not support {' and '.join(found)}; use the sequential ones")
