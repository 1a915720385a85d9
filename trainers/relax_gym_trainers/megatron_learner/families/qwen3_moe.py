"""Qwen 3 with experts in every layer."""

from __future__ import annotations

from relax_gym_trainers.megatron_learner.families.base import (
    ATTENTION,
    EXPERT,
    FRAME,
    NORMED_HEADS,
    Family,
    H,
    M,
    Rule,
    feed_forward,
    mixture,
)
from relax_gym_trainers.megatron_learner.families.forms import Copied

ROUTER = Rule(M + "mlp.router.weight", (H + "mlp.gate.weight",), Copied())

FAMILY = Family(
    ("qwen3_moe",),
    (*FRAME, *ATTENTION, *NORMED_HEADS, ROUTER, *feed_forward(EXPERT, "mlp.experts.{expert}")),
    lambda config: {"qk_layernorm": True} | mixture(config, normalised=config.norm_topk_prob),
    {
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
    },
)
