"""Qwen 2.5 VL: images and videos as tokens of three positions each."""

from __future__ import annotations

from dataclasses import replace

from relax_gym_trainers.megatron_learner.families import qwen2
from relax_gym_trainers.megatron_learner.families.base import with_towers

FAMILY = replace(
    qwen2.FAMILY,
    model_types=("qwen2_5_vl_text",),
    rules=with_towers(qwen2.FAMILY.rules, "model.", visual="visual."),
    interleaved=False,
    towers=("visual",),
)
