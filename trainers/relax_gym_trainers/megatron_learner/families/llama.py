"""Llama 2 and 3, SmolLM 2."""

from __future__ import annotations

from relax_gym_trainers.megatron_learner.families.base import ATTENTION, FRAME, MLP, Family

FAMILY = Family(
    ("llama",),
    (*FRAME, *ATTENTION, *MLP),
    needs={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
)
