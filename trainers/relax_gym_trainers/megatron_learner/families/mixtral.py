"""Mixtral without sliding windows."""

from __future__ import annotations

from relax_gym_trainers.megatron_learner.families.base import (
    ATTENTION,
    EXPERT,
    FRAME,
    Family,
    H,
    M,
    Rule,
    feed_forward,
    mixture,
)
from relax_gym_trainers.megatron_learner.families.forms import Copied

ROUTER = Rule(M + "mlp.router.weight", (H + "block_sparse_moe.gate.weight",), Copied())

FAMILY = Family(
    ("mixtral",),
    (
        *FRAME,
        *ATTENTION,
        ROUTER,
        *feed_forward(EXPERT, "block_sparse_moe.experts.{expert}", ("w1", "w3", "w2")),
    ),
    lambda config: mixture(config, normalised=True),
    {"hidden_act": "silu", "sliding_window": None},
)
