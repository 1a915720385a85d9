"""Small configs of Megatron for the tests of modules that need no whole model."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from megatron_kit import on_ranks

from relax_gym_trainers.megatron_learner import compat  # noqa: F401  (before megatron)
from relax_gym_trainers.megatron_learner.parallel import Layout

from megatron.core.transformer import TransformerConfig  # isort: skip


def transformer_config(**options: Any) -> TransformerConfig:
    """One layer on the CPU, without dropout; deprecations that Megatron's own defaults give are left out."""
    defaults = {"num_layers": 1, "attention_dropout": 0.0, "hidden_dropout": 0.0, "normalization": "RMSNorm"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TransformerConfig(**{**defaults, "use_cpu_initialization": True, **options})


def on_quiet_ranks(layout: Layout, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`on_ranks` without warnings: Megatron calls what newer releases of torch deprecate."""
    return on_ranks(layout, _quietly, function, *args)


def _quietly(layout: Layout, function: Callable[..., Any], *args: Any) -> Any:
    warnings.simplefilter("ignore")
    return function(layout, *args)
