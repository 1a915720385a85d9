"""The families of models that the Megatron learner trains, one in each file."""

from __future__ import annotations

from transformers import PretrainedConfig

from relax_gym.errors import ModelError
from relax_gym_trainers.megatron_learner.families import (
    llama,
    mistral,
    mixtral,
    qwen2,
    qwen2_5_omni,
    qwen2_5_vl,
    qwen3,
    qwen3_moe,
    qwen3_omni,
    qwen3_vl,
)
from relax_gym_trainers.megatron_learner.families.base import Family

FAMILIES: dict[str, Family] = {
    model_type: module.FAMILY
    for module in (
        llama,
        mistral,
        mixtral,
        qwen2,
        qwen3,
        qwen3_moe,
        qwen2_5_vl,
        qwen3_vl,
        qwen2_5_omni,
        qwen3_omni,
    )
    for model_type in module.FAMILY.model_types
}


def family_of(config: PretrainedConfig) -> Family:
    """The family of a text config.

    Raises:
        ModelError: no family has its `model_type`, or the config asks for what the family is not right for.
    """
    if config.model_type not in FAMILIES:
        raise ModelError(
            f"the Megatron learner has no family for model_type {config.model_type!r}; families: "
            f"{', '.join(FAMILIES)}; use the torch learner"
        )
    family = FAMILIES[config.model_type]
    family.check(config)
    return family
