"""Qwen 3: a norm over each head of queries and keys."""

from __future__ import annotations

from relax_gym_trainers.megatron_learner.families.base import ATTENTION, FRAME, MLP, NORMED_HEADS, Family

FAMILY = Family(
    ("qwen3",),
    (*FRAME, *ATTENTION, *NORMED_HEADS, *MLP),
    lambda config: {"qk_layernorm": True},
    {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
)
