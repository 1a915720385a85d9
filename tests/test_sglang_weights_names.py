"""Weights get the names that checkpoints have."""

from __future__ import annotations

import pytest
import torch

from relax_gym.errors import SamplerError
from relax_gym_plugins.samplers.sglang.weights.names import checkpoint_names


def test_stacked_experts_get_the_names_of_checkpoints() -> None:
    gate_up, down = torch.arange(24.0).view(2, 4, 3), torch.arange(12.0).view(2, 3, 2)
    weights = {"l.mlp.gate.weight": down[0], "l.mlp.experts.gate_up_proj": gate_up, "l.mlp.experts.down_proj": down}
    named = dict(checkpoint_names(weights.items(), "qwen3_moe"))
    assert list(named) == [
        "l.mlp.gate.weight",
        *(f"l.mlp.experts.{number}.{part}.weight" for number in (0, 1) for part in ("gate_proj", "up_proj")),
        *(f"l.mlp.experts.{number}.down_proj.weight" for number in (0, 1)),
    ]
    assert named["l.mlp.experts.1.up_proj.weight"].tolist() == [[18, 19, 20], [21, 22, 23]]
    assert named["l.mlp.experts.1.down_proj.weight"].tolist() == [[6, 7], [8, 9], [10, 11]]


def test_experts_of_a_model_that_is_not_known_are_refused() -> None:
    with pytest.raises(SamplerError, match=r"how checkpoints of gpt_oss hold experts is not known"):
        list(checkpoint_names([("l.mlp.experts.down_proj", torch.zeros(2, 3, 2))], "gpt_oss"))
