"""Loads the causal LM that is trained, chooses what of it is trainable, and gives its weights as plain ones."""

from __future__ import annotations

import contextlib
import fnmatch
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from relax_gym.errors import ConfigError, ModelError, suggestion
from relax_gym.models import empty_language_model, language_config, language_prefix, load_language_model
from relax_gym_trainers.model_folder import Checkpoint, write_folder
from relax_gym_trainers.torch_learner.options import LoraOptions, TorchLearnerOptions

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

LORA_WRAPPER = ".base_layer."


def load_model(folder: Path, *, trust_remote_code: bool) -> PreTrainedModel:
    """The causal LM of a folder, weights in float32.

    Raises:
        ModelError: transformers cannot load it.
    """
    with _readable(folder):
        model: Any = load_language_model(folder, dtype=torch.float32, trust_remote_code=trust_remote_code)
    plain: PreTrainedModel = model.eval()
    return plain


def load_settings(folder: Path, *, trust_remote_code: bool) -> PretrainedConfig:
    """The config of what `load_model` loads.

    Raises:
        ModelError: transformers does not know it.
    """
    with _readable(folder):
        return language_config(folder, trust_remote_code=trust_remote_code)


@contextlib.contextmanager
def _readable(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"cannot load a causal language model from {folder}: {error}") from error


def choose_device(name: str, *, key: str = "learner.device") -> torch.device:
    """`auto` is the first CUDA device or the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"{key} = {name!r} is no torch device; use auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"{key} = {name!r}, but torch sees {torch.cuda.device_count()} CUDA devices; use auto")
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on CUDA and on CPUs that multiply it in hardware, else float32."""
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" or _cpu_has_bfloat16() else "float32"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _cpu_has_bfloat16() -> bool:
    info = Path("/proc/cpuinfo")
    flags = info.read_text(encoding="utf-8").split() if info.exists() else []
    return "avx512_bf16" in flags or "amx_bf16" in flags


def check_trainable(
    folder: Path, settings: PretrainedConfig, options: TorchLearnerOptions, *, trust_remote_code: bool
) -> None:
    """Raise what `choose_trainable` would for the model of a folder and its config, which is not loaded."""
    if options.lora is not None or options.freeze or options.freeze_encoders:
        model = empty_language_model(settings, trust_remote_code=trust_remote_code)
        if not _ties_what_is_apart(model, folder):
            with torch.device("meta"):
                choose_trainable(model, options, seed=0)


def _ties_what_is_apart(model: PreTrainedModel, folder: Path) -> bool:
    """Whether a folder has a head beside embeddings that its config ties, which a loaded model keeps."""
    head = model.get_output_embeddings()
    if head is None or head.weight is not model.get_input_embeddings().weight:
        return False
    name = next(name for name, module in model.named_modules() if module is head)
    with contextlib.suppress(ModelError):  # weights of another kind
        return f"{name}.weight" in Checkpoint(folder).files
    return False


def choose_trainable(model: PreTrainedModel, options: TorchLearnerOptions, seed: int) -> None:
    """Freeze what `freeze` names and, if asked, the encoders; or put adapters into the model and freeze the rest.

    Raises:
        ConfigError: a pattern or target that matches nothing, nothing left to train, or peft is missing.
    """
    if options.lora is not None:
        if options.freeze:
            raise ConfigError(
                "learner.freeze and learner.lora exclude each other: lora already freezes all but adapters"
            )
        add_adapters(model, options.lora, seed)
    if options.freeze_encoders:
        encoders = encoder_parameters(model)
        if not encoders:
            raise ConfigError(
                f"learner.freeze_encoders = true, but {type(model).__name__} has no encoder of images, video or audio"
            )
        for parameter in encoders:
            parameter.requires_grad_(False)
    names = [name for name, _ in model.named_parameters()]
    for pattern in options.freeze:
        matched = fnmatch.filter(names, pattern)
        if not matched:
            raise ConfigError(f"learner.freeze: {pattern!r} matches no parameter{suggestion(pattern, names)}")
        for name in matched:
            model.get_parameter(name).requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"learner.freeze = {list(options.freeze)} leaves no parameter to train")


def encoder_parameters(model: PreTrainedModel) -> list[torch.nn.Parameter]:
    """All parameters but those of the text decoder and the head."""
    whole: Any = model
    text = {id(p) for part in (whole.get_decoder(), whole.get_output_embeddings()) for p in part.parameters()}
    return [parameter for parameter in model.parameters() if id(parameter) not in text]


def add_adapters(model: PreTrainedModel, options: LoraOptions, seed: int) -> None:
    """Put new adapters into the model and freeze the rest; the same ones for the same seed.

    Raises:
        ConfigError: peft is missing, a target matches nothing, or an adapted weight is that of two modules.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ConfigError('learner.lora needs peft: pip install "relax-gym[lora]"') from error
    # Inside another module it is no model of transformers, in which peft would take stacked experts for linears.
    whole = torch.nn.ModuleDict({"model": model})
    targets = _all_linears(whole, model) if options.targets == "all-linear" else list(options.targets)
    config = LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(config, whole)
        except ValueError as error:
            raise ConfigError(f"learner.lora.targets = {options.targets!r}: {error}") from error
    _check_adapters(model, options)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)


def _check_adapters(model: PreTrainedModel, options: LoraOptions) -> None:
    adapted = [name.partition(".lora_")[0] for name, _ in model.named_parameters() if ".lora_" in name]
    for target in options.targets if options.targets != "all-linear" else ():
        if not any(f".{name}".endswith(f".{target}") for name in adapted):
            raise ConfigError(
                f"learner.lora.targets = {options.targets!r}: no linear is called {target}; experts that are stacked "
                'in one tensor, and their router, cannot be adapted: name other modules, or use targets = "all-linear"'
            )
    pair = (model.get_input_embeddings(), model.get_output_embeddings())
    embedding, head = ({id(weight) for weight in module.parameters()} if module else set() for module in pair)
    names = [name for name, module in model.named_modules() if any(module is one for one in pair)]
    if embedding & head and (shared := sorted({*names}.intersection(adapted))):
        raise ConfigError(
            f"learner.lora.targets = {options.targets!r} adapts {shared[0]}, but {' and '.join(names)} have one weight "
            "between them, which cannot hold what only one of them learns; leave both out of targets, or train whole "
            "weights, without learner.lora"
        )


def _all_linears(whole: torch.nn.Module, model: PreTrainedModel) -> list[str]:
    """Those of the model but its head, each by its name in `whole`."""
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    linears = (
        (name, module) for name, module in whole.named_modules() if isinstance(module, (torch.nn.Linear, Conv1D))
    )
    return [name for name, module in linears if module is not head]


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Recompute each layer's activations in backward."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    enable: Any = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            # A layer asks only itself whether it is training before it checkpoints; what is inside stays in eval mode.
            module.training = True
            for name, value in vars(module).items():
                if "dropout" in name and isinstance(value, float):
                    setattr(module, name, 0.0)


def plain_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Parameters under their Hugging Face names, tied ones once, adapters merged into what they adapt."""
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            continue
        tensor = parameter.detach()
        if LORA_WRAPPER in name:
            layer: Any = model.get_submodule(name.rpartition(LORA_WRAPPER)[0])
            if name.endswith(".weight"):
                with torch.no_grad():
                    for adapter in layer.active_adapters:
                        tensor = tensor + layer.get_delta_weight(adapter)
            name = name.replace(LORA_WRAPPER, ".")
        yield name, tensor


def checkpoint_name(name: str, prefix: str) -> str:
    """What a weight of the model is called in a folder where names begin with `prefix`, one of Qwen's Omni, which has
    the parts of the thinker one level higher."""
    if not prefix:
        return name
    head, _, rest = name.partition(".")
    if head == "model":
        name = "model." + rest.removeprefix("language_model.") if rest.startswith("language_model.") else rest
    return prefix + name


def export_model(model: PreTrainedModel, folder: Path, *, adapted: bool, source: Path | None = None) -> None:
    """Write float32 safetensors and the config.

    Args:
        adapted: Whether adapters must be merged first.
        source: The folder that the model was loaded from. If it is a part of the model there, the others are copied.
    """
    if source is not None and (prefix := language_prefix(source)):
        with tempfile.TemporaryDirectory(dir=folder.parent) as part:
            export_model(model, Path(part), adapted=adapted)
            written = Checkpoint(Path(part))
            # What transformers has loaded under the prefix it writes under the prefix.
            names = {prefix + name.removeprefix(prefix): name for name in written.files}
            write_folder(((name, written[own][...]) for name, own in names.items()), source, folder)
        return
    if not adapted:
        model.save_pretrained(folder)
        return
    with torch.device("meta"):
        plain: Any = type(model)._from_config(model.config)
    kept = model.state_dict()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in kept}
    plain.load_state_dict({**buffers, **dict(plain_weights(model))}, strict=False, assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    plain.save_pretrained(folder)
