"""Replays the sampler's choice of experts in Megatron's routers (R3: Ma et al. 2025, arXiv:2510.11370).

The indices are the sampler's, the scores and their gradient the model's own, however the router scores.

Routers ask the object at their `router_replay` which experts to take; in megatron-core from 0.16 that can be its own
`RouterReplay`. That one is not used: it keeps all routers of a process in one list, also those of teachers; its queue
for recomputation grows where nothing is recomputed; and it knows no tokens whose experts are unknown. Here the experts
travel with the pack, as the angles of its positions do, so that each layer has those of the tokens it computes: in
forward, again in backward, and with any number of micro-batches on their way through a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from relax_gym.errors import TrainingError
from relax_gym_trainers.device import upload
from relax_gym_trainers.megatron_learner import compat, hf  # noqa: F401  (compat before megatron)
from relax_gym_trainers.torch_learner.packing import UNROUTED
from relax_gym_trainers.torch_learner.replay import check_fits

from megatron.core import parallel_state  # isort: skip

Choose = Callable[..., tuple[Tensor, Tensor]]


class RouterReplay:
    """Hooks on the layers of one chunk. Nothing changes for packs that were given no experts."""

    def __init__(self, chunk: Any) -> None:
        """`chunk` may be wrapped."""
        model = hf.unwrapped(chunk)
        self._config = model.config
        self._layers: list[int] = []
        layers = [layer for layer in model.decoder.layers if hasattr(layer.mlp, "router")]
        for place, layer in enumerate(layers):
            self._layers.append(layer.layer_number - 1)
            layer.mlp.router.router_replay = chosen = Chosen(place)
            layer.register_forward_pre_hook(chosen.take, with_kwargs=True)
        self.wrong: Tensor | None = None

    def check(self, experts: NDArray[np.int32]) -> None:
        """Raise TrainingError unless experts [T, layers, top_k] fit the whole model; the same on every rank."""
        config = self._config
        check_fits(experts, [config.moe_router_topk] * config.num_layers if config.num_moe_experts else [])

    def keep(self, packed: Any, experts: NDArray[np.int32], device: torch.device) -> None:
        """Let the chunk route a pack so.

        Args:
            packed: Its parameters, which the chunk is called with.
            experts: Of this context-parallel rank's t tokens in all layers of the model, [t, layers, top_k].
            device: The chunk's.
        """
        mine = torch.from_numpy(experts)
        if self._config.sequence_parallel:
            shares = mine.chunk(parallel_state.get_tensor_model_parallel_world_size())
            mine = shares[parallel_state.get_tensor_model_parallel_rank()]
        chosen = upload(mine, device).long()[:, self._layers].transpose(0, 1).contiguous()
        ordered = chosen.sort(-1).values
        wrong = (ordered[..., 0] < 0) | (ordered[..., -1] >= self._config.num_moe_experts)
        wrong |= (ordered.diff(dim=-1) == 0).any(-1)
        wrong &= (ordered != UNROUTED).any(-1)
        self.wrong = wrong.any() if self.wrong is None else self.wrong | wrong.any()
        chosen = chosen.masked_fill(wrong[..., None], UNROUTED)  # a kernel that met one would abort
        packed.experts = chosen, chosen == UNROUTED


class Chosen:
    """What one router asks for the experts of its tokens."""

    def __init__(self, place: int) -> None:
        """`place` is the layer's among those of its chunk that have experts."""
        self._place = place
        self._experts: tuple[Tensor, Tensor] | None = None

    def take(self, layer: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """The layer is about to compute a pack, for the first time or again."""
        kept: tuple[Tensor, Tensor] | None = getattr(options["packed_seq_params"], "experts", None)
        self._experts = None if kept is None else (kept[0][self._place], kept[1][self._place])

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: Choose
    ) -> tuple[Tensor, Tensor]:
        """Scores and indices [t, top_k] of experts, from the scores [t, experts] by which the router would `choose`.

        Called by megatron-core, which makes weights of what it gets: a softmax over it, or before.
        """
        values, own = choose(scores, topk, num_groups, group_topk)
        if self._experts is None:
            return values, own
        asked, unknown = self._experts
        indices = torch.where(unknown, own, asked)
        return scores.gather(1, indices), indices


def refuse_wrong(replays: Collection[RouterReplay], group: Any) -> None:
    """After a pass that replayed: raise TrainingError on all ranks of `group` (gloo) if any met wrong experts."""
    wrong = torch.tensor(any(bool(replay.wrong) for replay in replays), dtype=torch.uint8)
    for replay in replays:
        replay.wrong = None
    dist.all_reduce(wrong, dist.ReduceOp.MAX, group=group)
    if wrong:
        raise TrainingError(
            "the sampler gave some token experts that the model does not have, or one of them twice; a token's experts "
            f"are different numbers from 0 below the model's number of experts, or all {UNROUTED} where unknown: "
            "sampler and learner must run the same mixture-of-experts model"
        )
