"""The names that SGLang knows: those of checkpoints, which are not always those of a model in memory."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import Tensor

from relax_gym.errors import SamplerError
from relax_gym.sampler import Weights

STACKED = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")
UNSTACKED_MODELS = ("qwen2_moe", "qwen3_moe")
"""Models whose checkpoints have each expert by itself where transformers 5 stacks them."""


def checkpoint_names(weights: Weights, model_type: str) -> Iterator[tuple[str, Tensor]]:
    """The same weights under the names of a checkpoint; experts are views of what they are stacked in.

    SGLang leaves out tensors whose names it does not know with no more than a line in its log, so a model that is not
    known here is refused.

    Args:
        model_type: of the model's config.

    Raises:
        SamplerError: experts are stacked in a model that is not in `UNSTACKED_MODELS`.
    """
    for name, tensor in weights:
        match = STACKED.search(name)
        if not match:
            yield name, tensor
            continue
        if model_type not in UNSTACKED_MODELS:
            raise SamplerError(
                f"{name}: how checkpoints of {model_type} hold experts is not known here; models of these types can be "
                f"sent to SGLang: {', '.join(UNSTACKED_MODELS)}"
            )
        prefix = name[: match.start()]
        for number, expert in enumerate(tensor):
            if match[1] == "down_proj":
                yield f"{prefix}.experts.{number}.down_proj.weight", expert
                continue
            for part, half in zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True):
                yield f"{prefix}.experts.{number}.{part}.weight", half
