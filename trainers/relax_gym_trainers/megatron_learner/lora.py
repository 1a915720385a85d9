"""Low-rank adapters: those of peft on the model of `transformers`, on this rank's share of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from transformers import PretrainedConfig, PreTrainedModel

from relax_gym.errors import ConfigError, RunFolderError
from relax_gym.models import empty_language_model
from relax_gym_trainers.megatron_learner import compat, hf  # noqa: F401  (compat before megatron)
from relax_gym_trainers.megatron_learner.families import family_of
from relax_gym_trainers.megatron_learner.families.base import OUTPUT, sizes
from relax_gym_trainers.megatron_learner.families.forms import Copied
from relax_gym_trainers.megatron_learner.modules.adapters import Lie, local
from relax_gym_trainers.megatron_learner.options import MegatronLearnerOptions
from relax_gym_trainers.megatron_learner.parallel import Layout
from relax_gym_trainers.torch_learner.model import add_adapters, encoder_parameters
from relax_gym_trainers.torch_learner.options import LoraOptions

from megatron.core import parallel_state  # isort: skip

LINEARS = ("linear_qkv.weight", "linear_proj.weight", "linear_fc1.weight", "linear_fc2.weight")
Weights = dict[str, tuple[Tensor, Tensor]]
"""A [rank, in] and B [out, rank] by the name of the module in the decoder, as `layers.0.self_attn.q_proj`."""


def adapt(
    chunks: Sequence[Any],
    config: PretrainedConfig,
    whole: PretrainedConfig,
    layout: Layout,
    options: LoraOptions,
    *,
    seed: int,
    freeze_encoders: bool = False,
) -> None:
    """Freeze this rank's chunks, filled already, and put the adapters into them that the torch learner begins with.

    Args:
        config: The text config, of which `whole` is the config.
        freeze_encoders: Leave out the encoders' adapters.

    Raises:
        ConfigError: a target is no linear of the decoder, or matches nothing; or a part of the pipeline has none.
    """
    weights = initial(hollow(whole), options, seed, freeze_encoders=freeze_encoders)
    _check(weights, config, layout, options)
    for chunk in chunks:
        chunk.requires_grad_(False)
        modules = dict(chunk.named_modules())
        for name, _, place in list(hf.places(chunk, config)):
            names = [_inside(hub, config) for hub in place.hub]
            mine = {module.rpartition(".")[2]: weights[module] for module in names if module in weights}
            if mine:
                linear: Any = modules[name.removesuffix(".weight")]
                rows = local(sizes(config), layout.tp)
                fused = tuple(module.rpartition(".")[2] for module in names)
                linear.adapt(Lie(fused, place.rule.form, rows), mine, options.alpha / options.rank)
        if chunk.pre_process:
            # Recomputation gives nothing beneath it a gradient if its input needs none.
            chunk.embedding.register_forward_hook(lambda module, args, out: out.requires_grad_())


def check_targets(
    config: PretrainedConfig, whole: PretrainedConfig, layout: Layout, options: LoraOptions, *, freeze_encoders: bool
) -> None:
    """Raise what `adapt` would; no weights are there."""
    with torch.device("meta"):
        weights = initial(empty_language_model(whole), options, seed=0, freeze_encoders=freeze_encoders)
    _check(weights, config, layout, options)


def initial(model: Any, options: LoraOptions, seed: int, *, freeze_encoders: bool) -> Weights:
    """What peft begins with, put into `model`. Modules that are not in the decoder have their whole names."""
    add_adapters(model, options, seed)
    decoder = model.get_decoder()
    (prefix,) = (f"{name}." for name, module in model.named_modules() if module is decoder)
    left_out = {id(parameter) for parameter in encoder_parameters(model)} if freeze_encoders else set()
    matrices: dict[str, dict[str, Tensor]] = {}
    for name, parameter in model.named_parameters():
        module, found, rest = name.partition(".lora_")
        if found and id(parameter) not in left_out:
            matrices.setdefault(module.removeprefix(prefix), {})[rest[0]] = parameter.detach()
    return {name: (pair["A"], pair["B"]) for name, pair in matrices.items()}


def hollow(config: PretrainedConfig) -> PreTrainedModel:
    """The model of `transformers` on the CPU with parameters that take no memory: each is one number, expanded."""
    model = empty_language_model(config)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, Parameter(torch.zeros(()).expand(parameter.shape), requires_grad=False))
    return model


def _inside(hub: str, config: PretrainedConfig) -> str:
    """The name in the decoder of the module whose weight the hub calls so."""
    (embedding,) = family_of(config).embedding.hub
    return hub.removesuffix(".weight").removeprefix(embedding.removesuffix("embed_tokens.weight"))


def _check(weights: Weights, config: PretrainedConfig, layout: Layout, options: LoraOptions) -> None:
    known = {
        _inside(name, config)
        for rule, _, _, names in family_of(config).hub_names(config)
        if rule.megatron.endswith(LINEARS) and not rule.of_experts
        for name in names
    }
    if strange := sorted(weights.keys() - known):
        kinds = sorted({name.rpartition(".")[2] for name in known})
        raise ConfigError(
            f"learner.lora.targets = {options.targets!r} adapts {strange[0]}, but the Megatron learner adapts linears "
            f"of the decoder only; name those ({', '.join(kinds)}) in targets, leave encoders out with "
            'learner.freeze_encoders = true, or use learner.name = "torch"'
        )
    size = config.num_hidden_layers // (layout.pp * layout.vpp)
    having = {int(name.split(".")[1]) // size for name in weights}
    if missing := sorted(set(range(layout.pp * layout.vpp)) - having):
        first = missing[0] * size
        raise ConfigError(
            f"learner.lora.targets = {options.targets!r} adapts none of the layers {first} to {first + size - 1}, "
            "which are a chunk of the pipeline; adapt some there, or lower learner.pp or learner.vpp"
        )


# What a checkpoint of adapters is of ----------------------------------------------------------------------------------


def facts(
    chunks: Sequence[Any], config: PretrainedConfig, options: MegatronLearnerOptions, model: Path, control: Any
) -> dict[str, Any] | None:
    """What must be the same where the adapters are used, and the folder of the model beneath them; None without
    adapters. All ranks of the group `control` call it."""
    if options.lora is None:
        return None
    return {
        "options": options.lora.model_dump(mode="json"),
        "freeze_encoders": options.freeze_encoders,
        "base": checksum(chunks, config, control),
        "model": str(model.resolve()),
    }


@torch.no_grad()
def checksum(chunks: Sequence[Any], config: PretrainedConfig, control: Any) -> float:
    """The sum of the weights beneath the adapters, each once."""
    found: list[Any] = [None] * dist.get_world_size(control)
    alone = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    mine = math.fsum(_sums(chunks, config)) if alone else 0.0
    dist.all_gather_object(found, mine, group=control)
    return math.fsum(found)


def _sums(chunks: Sequence[Any], config: PretrainedConfig) -> Iterator[float]:
    first = parallel_state.get_tensor_model_parallel_rank() == 0
    for chunk in chunks:
        for _, parameter, place in hf.places(chunk, config):
            twice = place.rule is OUTPUT and config.tie_word_embeddings
            if not twice and not place.rule.of_experts and (first or not isinstance(place.rule.form, Copied)):
                yield parameter.sum(dtype=torch.float64).item()


def rebuild(
    chunks: Sequence[Any],
    config: PretrainedConfig,
    whole: PretrainedConfig,
    layout: Layout,
    saved: dict[str, Any],
    checkpoint: Path,
) -> None:
    """Fill one rank's chunks with the weights beneath a checkpoint's adapters, and put adapters into them.

    Args:
        saved: The checkpoint's `facts`.

    Raises:
        RunFolderError: the model that the run began with is no longer there.
    """
    model = Path(saved["model"])
    if not model.is_dir():
        raise RunFolderError(f"{checkpoint} holds adapters of the model in {model}, which is not there; put it back")
    hf.load(chunks, model, config)
    options = LoraOptions.model_validate(saved["options"])
    adapt(chunks, config, whole, layout, options, seed=0, freeze_encoders=saved["freeze_encoders"])
    mine = checksum(chunks, config, dist.group.WORLD)
    check(saved, {**saved, "base": mine}, checkpoint)


def check(saved: dict[str, Any] | None, mine: dict[str, Any] | None, folder: Path) -> None:
    """Whether a learner can take saved adapters, or weights.

    Args:
        saved: The `facts` of a checkpoint with adapters, else None; `mine` are the learner's.

    Raises:
        RunFolderError: it cannot.
    """
    if saved is None or mine is None:
        if saved is not mine:
            raise RunFolderError(f"{folder} was trained {'with' if saved else 'without'} learner.lora")
        return
    if saved["options"] != mine["options"]:
        raise RunFolderError(f"{folder} was trained with learner.lora = {saved['options']}; set it to this")
    if not math.isclose(saved["base"], mine["base"], rel_tol=1e-9, abs_tol=1e-9):
        raise RunFolderError(
            f"{folder} holds adapters of another model than the one loaded; set model.name to the model that the run "
            "began with"
        )
