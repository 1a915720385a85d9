"""The thinker of Qwen 3 Omni: images, videos and audio, experts in every layer."""

from __future__ import annotations

from dataclasses import replace

from relax_gym_trainers.megatron_learner.families import qwen3_moe
from relax_gym_trainers.megatron_learner.families.base import with_towers

FAMILY = replace(
    qwen3_moe.FAMILY,
    model_types=("qwen3_omni_moe_text",),
    rules=with_towers(qwen3_moe.FAMILY.rules, "model.", visual="visual.", audio_tower="audio_tower."),
    interleaved=True,
    towers=("visual", "audio_tower"),
)
