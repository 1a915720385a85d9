"""The thinker of Qwen 2.5 Omni: images, videos and audio."""

from __future__ import annotations

from dataclasses import replace

from relax_gym_trainers.megatron_learner.families import qwen2
from relax_gym_trainers.megatron_learner.families.base import with_towers

FAMILY = replace(
    qwen2.FAMILY,
    model_types=("qwen2_5_omni_text",),
    rules=with_towers(qwen2.FAMILY.rules, "model.", visual="visual.", audio_tower="audio_tower."),
    interleaved=False,
    towers=("visual", "audio_tower"),
)
