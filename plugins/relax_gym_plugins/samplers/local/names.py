"""Names of checkpoints for the weights that `transformers` holds otherwise: experts, which it stacks, and parts of
models that see and hear, which it holds one level deeper."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

PARTS = {"gate_up_proj": (("gate_proj", "w1"), ("up_proj", "w3")), "down_proj": (("down_proj", "w2"),)}
"""What is stacked → what each expert of it is cut into, as Qwen and as Mixtral name it."""

DEEPER = {"model.language_model.": "model.", "model.visual.": "visual.", "model.audio_tower.": "audio_tower."}
"""What names begin with in a model → in checkpoints of Qwen 2.5 VL and of the thinkers of Qwen's Omni."""


def checkpoint_views(own: Mapping[str, Tensor]) -> Iterator[tuple[str, str, Tensor]]:
    """(name in a checkpoint, name in the model, view of that tensor) where they differ: as checkpoints of Qwen name
    them and as those of Mixtral do.

    Args:
        own: The model's tensors; `experts.gate_up_proj` is [experts, gate and up, hidden], `experts.down_proj`
            [experts, hidden, inner].
    """
    for alias, name, view in _experts(own):
        yield alias, name, view
        yield from _deeper(alias, name, view)
    for name, tensor in own.items():
        yield from _deeper(name, name, tensor)


def _deeper(alias: str, name: str, view: Tensor) -> Iterator[tuple[str, str, Tensor]]:
    for start, hub in DEEPER.items():
        if alias.startswith(start):
            yield hub + alias.removeprefix(start), name, view


def _experts(own: Mapping[str, Tensor]) -> Iterator[tuple[str, str, Tensor]]:
    for name, stacked in own.items():
        layer, _, stack = name.rpartition(".mlp.experts.")
        if layer and stack in PARTS:
            for number, expert in enumerate(stacked.detach()):
                for (qwen, mixtral), part in zip(PARTS[stack], expert.chunk(len(PARTS[stack])), strict=True):
                    yield f"{layer}.mlp.experts.{number}.{qwen}.weight", name, part
                    yield f"{layer}.block_sparse_moe.experts.{number}.{mixtral}.weight", name, part
        elif name.endswith(".mlp.gate.weight"):
            yield name.replace(".mlp.", ".block_sparse_moe."), name, stacked
