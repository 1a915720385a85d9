"""Options of the local sampler. Imports no torch, so that a config can be checked quickly."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from relax_gym.config import Options
from relax_gym.errors import ConfigError

DEFAULT_CONTEXT = 8192


class LocalSamplerOptions(Options):
    """`[sampler] name = "local"`: in-process sampling with continuous batching."""

    may_change = ("device", "max_slots", "prefill_tokens", "deterministic")

    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="auto is bfloat16 on CUDA and on CPUs that multiply in it, else float32"
    )
    device: str = Field("auto", description="auto is cuda when there is one, else cpu; or any torch device")
    max_slots: int = Field(64, ge=1, description="contexts whose keys and values are kept; more requests wait")
    max_context: int | None = Field(
        None, ge=2, description="most tokens of a prompt with its completion; default: the model's, at most 8192"
    )
    prefill_tokens: int = Field(4096, ge=1, description="most tokens of one prefill forward; longer prompts are split")
    deterministic: bool = Field(
        True,
        description="wait until every open session has a request before each step, so that a rerun is bit-identical; "
        "false lets requests go on while other episodes' environments are busy",
    )

    def context_limit(self, positions: int | None) -> int:
        """See `Options.context_limit`."""
        longest = positions or DEFAULT_CONTEXT
        limit = self.max_context or min(longest, DEFAULT_CONTEXT)
        if limit > longest:
            raise ConfigError(f"sampler.max_context = {limit}: the model has only {longest} positions")
        return limit
