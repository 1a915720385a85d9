"""Causal self-attention on torch: packed and padded rows, grouped queries, context parallel.

Megatron's own needs Transformer Engine for packed rows and for context parallelism, and holds [s, s] scores.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from relax_gym.errors import ConfigError
from relax_gym_trainers.megatron_learner import compat  # noqa: F401  (before megatron)
from relax_gym_trainers.megatron_learner.modules.flash import attend_packed, can_attend_packed
from relax_gym_trainers.megatron_learner.modules.pieces import Pieces, cut

from megatron.core import parallel_state  # isort: skip
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region  # isort: skip
from megatron.core.transformer.enums import AttnMaskType  # isort: skip
from megatron.core.transformer.module import MegatronModule  # isort: skip


class CoreAttention(MegatronModule):  # type: ignore[misc]
    """softmax(scale · q kᵀ) v for each head, each token looking at its row up to itself: Megatron's `core_attention`.

    Packed rows go to the flash kernel for rows of any length where there is one (bfloat16 on a GPU), else to one
    `scaled_dot_product_attention` each. Under context parallelism each rank has the chunks r and 2 · cp - 1 - r of the
    2 · cp of each row; it gathers keys and values, whatever `cp_comm_type` says, and their gradients are scattered.

    Raises:
        ConfigError: the config asks for what this module has not: a dropout, a sliding window, attention sinks, scores
            scaled by the layer, or attention that is not causal self-attention.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        sinks = getattr(config, "softmax_type", "vanilla")
        wrong = {
            f"attention_dropout = {dropout}: set it to 0": dropout,
            f"window_size = {config.window_size}: use a model without sliding windows": config.window_size,
            f"softmax_type = {sinks!r}: use a model without attention sinks": sinks != "vanilla",
            "apply_query_key_layer_scaling = True: set it to False": config.apply_query_key_layer_scaling,
            f"attention_type = {attention_type!r}: only 'self' is there": attention_type != "self",
            f"attn_mask_type = {attn_mask_type}: give causal or padding_causal": attn_mask_type
            not in (AttnMaskType.causal, AttnMaskType.padding_causal),
        }
        for message, is_wrong in wrong.items():
            if is_wrong:
                raise ConfigError(f"layer {layer_number}: CoreAttention does not support {message}")
        self.scale = softmax_scale
        self.cp_group = parallel_state.get_context_parallel_group() if pg_collection is None else pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """This rank's tokens and heads → weighted values.

        Args:
            query: [t, heads, d] of packed rows, or [s, b, heads, d] of padded ones; padding stands at a row's end.
            key: The same with as many heads or fewer, each shared by heads / fewer queries.
            packed_seq_params: `thd`: where rows begin, padded to multiples of 2 · cp. None: rows of equal length.

        Returns:
            [t, heads, d] or [s, b, heads · d].

        Raises:
            ValueError: a mask or a bias is given, or the rows are not those of `packed_seq_params`.
        """
        if attention_mask is not None or attention_bias is not None:
            raise ValueError("CoreAttention is causal: give no attention_mask (pad at the end) and no attention_bias")
        if packed_seq_params is None or packed_seq_params.qkv_format != "thd":
            pieces = Pieces.of([len(query) * self.cp_group.size()], len(query), self.cp_group, query.device)
            return self._attend(query, key, value, pieces).flatten(2)
        pieces = cut(packed_seq_params, len(query), self.cp_group, query.device)
        if can_attend_packed(query, key, value):
            key, value = self._gather(key, value, pieces)
            return attend_packed(query, key, value, pieces, self.scale)
        return self._attend(query[:, None], key[:, None], value[:, None], pieces)[:, 0]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, pieces: Pieces) -> Tensor:
        """[t, b, heads, d] → [t, b, heads, d], one call for each piece."""
        key, value = self._gather(key, value, pieces)
        lengths = (pieces.queries, pieces.keys, pieces.keys)
        runs: Any = zip(*map(torch.split, (query, key, value), lengths), strict=True)
        return torch.cat([_sdpa(q, k, v, self.scale) for q, k, v in runs])

    def _gather(self, key: Tensor, value: Tensor, pieces: Pieces) -> tuple[Tensor, Tensor]:
        """This rank's keys and values → those that each piece looks at, one after the other."""
        if pieces.order is None:
            return key, value
        both = torch.cat((key, value), -1)  # one collective instead of two
        both = gather_from_sequence_parallel_region(both, tensor_parallel_output_grad=True, group=self.cp_group)
        both = both.index_select(0, pieces.order)
        return both[..., : key.shape[-1]], both[..., key.shape[-1] :]


def _sdpa(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """[q, b, heads, d], [k, b, ..] → [q, b, heads, d]; the queries are the last ones of the k positions."""
    mask = None if len(query) == len(key) else causal_lower_right(len(query), len(key))
    query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    grouped = query.shape[1] != key.shape[1]
    out = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )
    return out.permute(2, 0, 1, 3)
