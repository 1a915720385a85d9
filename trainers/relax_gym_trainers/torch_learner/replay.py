"""Replays the sampler's choice of experts in a mixture-of-experts model (R3: Ma et al. 2025, arXiv:2510.11370).

The indices are the sampler's, the scores and their gradient the model's own. Otherwise two engines that differ by
rounding send a token to different experts, and its log-prob differs by far more than rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax_gym.errors import TrainingError
from relax_gym_trainers.torch_learner.packing import UNROUTED, MicroBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOLERANCE = 1e-4
NORMED = ("MixtralTopKRouter",)
"""Routers that divide scores by their sum, without an option that says so."""


class RouterReplay:
    """Hooks on the routers of a model whose scores are the softmax over all experts at the chosen ones (Qwen-MoE)."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.routers: list[Any] = [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]
        self._chosen: Tensor | None = None
        for layer, router in enumerate(self.routers):
            router.register_forward_hook(self._hook(layer))

    def use(self, batch: MicroBatch, device: torch.device) -> None:
        """Route the next forward pass as the batch says, and its recomputation in backward too.

        Raises:
            TrainingError: the batch has experts that do not fit the model.
        """
        self._chosen = None
        if batch.experts is None:
            return
        check_fits(batch.experts, [getattr(router, "top_k", None) for router in self.routers])
        self._chosen = torch.from_numpy(batch.experts).to(device, torch.int64).flatten(0, 1)

    def _hook(self, layer: int) -> Any:
        def replay(router: Any, inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            if self._chosen is None:
                return output
            logits, scores, own = output
            chosen = self._chosen[:, layer]
            indices = torch.where(chosen == UNROUTED, own, chosen).to(own.dtype)
            _check(router, logits, scores, own)
            return logits, router_scores(router, logits, indices).to(scores.dtype), indices

        return replay


def check_fits(experts: NDArray[np.int32], expected: Sequence[int | None]) -> None:
    """Raise TrainingError unless experts [.., layers, top_k] fit routers that choose as many as `expected`."""
    layers, top_k = experts.shape[-2:]
    if list(expected) != [top_k] * layers:
        raise TrainingError(
            f"the sampler gave {top_k} experts in each of {layers} layers; the model here has routers with top_k "
            f"{list(expected)}: sampler and learner must run the same mixture-of-experts model"
        )


def router_scores(router: Any, logits: Tensor, indices: Tensor) -> Tensor:
    """Softmax over all experts, [n, E], at `indices` [n, top_k], divided by its sum if the model does so."""
    chosen = logits.softmax(-1, dtype=torch.float32).gather(-1, indices)
    normed = getattr(router, "norm_topk_prob", type(router).__name__ in NORMED)
    return chosen / chosen.sum(-1, keepdim=True) if normed else chosen


def _check(router: Any, logits: Tensor, scores: Tensor, own: Tensor) -> None:
    """The model's own choice, replayed, must give the model's own scores."""
    with torch.no_grad():
        if not torch.allclose(router_scores(router, logits, own).to(scores.dtype), scores, atol=TOLERANCE):
            raise TrainingError(
                f"{type(router).__name__} does not score experts by a softmax over all of them, so a sampler's choice "
                "cannot be replayed; have the sampler return no routed experts"
            )
