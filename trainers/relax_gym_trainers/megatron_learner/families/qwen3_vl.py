"""Qwen 3 VL: images and videos as tokens of three positions each, with features for the first decoder layers."""

from __future__ import annotations

from dataclasses import replace

from relax_gym_trainers.megatron_learner.families import qwen3
from relax_gym_trainers.megatron_learner.families.base import with_towers

FAMILY = replace(
    qwen3.FAMILY,
    model_types=("qwen3_vl_text",),
    rules=with_towers(qwen3.FAMILY.rules, "model.language_model.", visual="model.visual."),
    interleaved=True,
    towers=("visual",),
)
