"""Qwen 2 and 2.5: biases on queries, keys and values."""

from __future__ import annotations

from relax_gym_trainers.megatron_learner.families.base import ATTENTION, FRAME, MLP, Family, query_key_value

FAMILY = Family(
    ("qwen2",),
    (*FRAME, *ATTENTION, query_key_value("bias"), *MLP),
    lambda config: {"add_qkv_bias": True},
    {"hidden_act": "silu", "use_sliding_window": False},
)
