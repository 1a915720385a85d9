"""Mistral and Ministral without sliding windows (from version 0.2 of the 7B)."""

from __future__ import annotations

from relax_gym_trainers.megatron_learner.families.base import ATTENTION, FRAME, MLP, Family

FAMILY = Family(("mistral",), (*FRAME, *ATTENTION, *MLP), needs={"hidden_act": "silu", "sliding_window": None})
