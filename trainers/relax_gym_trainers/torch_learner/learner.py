"""One process, one device, any Hugging Face causal LM."""

from __future__ import annotations

import contextlib
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch

from relax_gym.config import load_algorithms
from relax_gym.context import RunContext
from relax_gym.errors import RunFolderError
from relax_gym.models import language_prefix
from relax_gym.sampler import Weights
from relax_gym_trainers.host_state import HostState, restore
from relax_gym_trainers.policy_learner import PolicyLearner
from relax_gym_trainers.torch_learner import model as models
from relax_gym_trainers.torch_learner.backend import TorchBackend
from relax_gym_trainers.torch_learner.distillation import check_teachers, load_distiller
from relax_gym_trainers.torch_learner.objectives import build_objectives
from relax_gym_trainers.torch_learner.optimizer import apply_gradient, build_optimizer
from relax_gym_trainers.torch_learner.options import TorchLearnerOptions
from relax_gym_trainers.torch_learner.policy import Policy
from relax_gym_trainers.torch_learner.teacher import check_teacher, vocabulary_rows

STATE_FILE = "learner_state.pt"


class TorchLearner(PolicyLearner):
    """Trains float32 weights with AdamW; arithmetic in `options.dtype`."""

    options: TorchLearnerOptions
    backend: TorchBackend

    def __init__(self, context: RunContext, options: TorchLearnerOptions) -> None:
        """Load the model of `context.model_path`; algorithm, temperature and length of the run come from the config.

        Raises:
            ConfigError: options that contradict each other or the machine.
            ModelError: the model cannot be loaded or gives non-finite numbers.
        """
        config = context.config
        self.options = options
        algorithms = load_algorithms(config)
        self.total_steps = config.train.steps
        self._trust_remote_code = config.model.trust_remote_code
        self._source, self._prefix = context.model_path, language_prefix(context.model_path)
        device = models.choose_device(options.device)
        dtype = models.choose_dtype(options.dtype, device)
        model = models.load_model(context.model_path, trust_remote_code=self._trust_remote_code)
        models.choose_trainable(model, options, config.seed)
        model.to(device)  # type: ignore[arg-type]
        if options.activation_checkpointing:
            models.checkpoint_activations(model)
        self.policy = Policy(
            model,
            temperature=config.rollout.temperature,
            dtype=dtype,
            chunk=options.logprob_chunk,
            share_prefix=options.share_prefix,
            processor=context.processor,
            never_sampled=context.never_sampled,
        )
        self.backend = TorchBackend(self.policy, options)
        self.parameters = self.backend.parameters
        self.objectives = build_objectives(
            algorithms,
            config,
            self.backend,
            lambda distillation: load_distiller(distillation, context, options, self.policy),
        )
        self.optimizer = build_optimizer(self.parameters, options)
        self.version = 0
        self._imitation: torch.optim.AdamW | None = None
        self._reference_moved = False
        if any(algorithm.needs_reference for algorithm in algorithms):
            self.backend.reference.take()

    @classmethod
    def check_model(cls, context: RunContext, options: TorchLearnerOptions) -> None:
        """See `Learner.check_model`."""
        if not isinstance(options, TorchLearnerOptions):  # those of a subclass
            return
        trust = context.config.model.trust_remote_code
        models.choose_device(options.device)
        settings = models.load_settings(context.model_path, trust_remote_code=trust)
        models.check_trainable(context.model_path, settings, options, trust_remote_code=trust)
        rows = vocabulary_rows(settings)
        check = partial(check_teacher, tokenizer=context.tokenizer, rows=rows, trust_remote_code=trust)
        check_teachers(context, rows, check)

    def apply(self, lr: float, *, imitation: bool = False) -> float:
        """See `PolicyLearner.apply`."""
        optimizer = self.optimizer
        if imitation:
            optimizer = self._imitation = self._imitation or build_optimizer(self.parameters, self.options)
        offloaded = HostState([optimizer], [self.policy.model]) if self.options.offload_optimizer else None
        with contextlib.nullcontext() if offloaded is None else offloaded.on_device():
            return apply_gradient(optimizer, lr=lr, clip=self.options.grad_clip, step=self.version + 1)

    def leave_warmup(self) -> None:
        """See `PolicyLearner.leave_warmup`. The reference is the model after the warm-up."""
        if self._imitation is None:
            return
        self._imitation = None
        if self.version == 0 and self.backend.reference.values:
            self.backend.reference.take()
            self._reference_moved = True

    def weights(self) -> Weights:
        """Views of the float32 weights; with LoRA, new tensors with the adapters merged in."""
        weights = models.plain_weights(self.policy.model)
        return ((models.checkpoint_name(name, self._prefix), tensor) for name, tensor in weights)

    def rest(self) -> None:
        """Give a GPU what torch keeps of it for the next step."""
        if self.policy.device.type == "cuda":
            torch.cuda.empty_cache()

    def export(self, folder: Path) -> None:
        """Write float32 safetensors, adapters merged."""
        models.export_model(self.policy.model, folder, adapted=self.options.lora is not None, source=self._source)

    def save_state(self, folder: Path) -> None:
        """Write optimizer, version, random state and, with LoRA, the adapters."""
        folder.mkdir(parents=True, exist_ok=True)
        state = {
            "version": self.version,
            "optimizer": self.optimizer.state_dict(),
            "imitation": self._imitation.state_dict() if self._imitation else None,
            "reference": self.backend.reference.values if self._reference_moved else None,
            "adapters": [p.detach() for p in self.parameters] if self.options.lora else None,
            "base": self._base_checksum() if self.options.lora else None,
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all() if self.policy.device.type == "cuda" else None,
        }
        torch.save(state, folder / STATE_FILE)

    def load(self, folder: Path) -> None:
        """Go on where `export` and `save_state` left off.

        The learner must be built from the model the run began with: with LoRA it holds the weights under the adapters,
        with KL it is the reference.

        Raises:
            RunFolderError: the folder lacks the state, or belongs to another model.
        """
        if not (folder / STATE_FILE).is_file():
            raise RunFolderError(f"{folder} holds no {STATE_FILE}; give a checkpoint that a torch learner has written")
        state: dict[str, Any] = torch.load(folder / STATE_FILE, map_location="cpu", weights_only=True)
        if (state["adapters"] is not None) != (self.options.lora is not None):
            raise RunFolderError(f"{folder} was trained {'with' if state['adapters'] else 'without'} learner.lora")
        if state["adapters"] is None:
            saved = models.load_model(folder, trust_remote_code=self._trust_remote_code)
            self.policy.model.load_state_dict(saved.state_dict())
        else:
            self._load_adapters(state, folder)
        self.version = state["version"]
        self._load_optimizer(self.optimizer, state["optimizer"])
        self._imitation = None
        if state["imitation"]:
            self._imitation = build_optimizer(self.parameters, self.options)
            self._load_optimizer(self._imitation, state["imitation"])
        if state["reference"]:
            self._reference_moved = True
            for value, saved in zip(self.backend.reference.values, state["reference"], strict=True):
                value.copy_(saved)
        torch.set_rng_state(state["rng"].cpu())
        if state["cuda_rng"]:
            torch.cuda.set_rng_state_all([value.cpu() for value in state["cuda_rng"]])

    def close(self) -> None:
        """Drop weights and optimizer state. Idempotent."""
        self.optimizer.state.clear()
        for objective in self.objectives:
            if objective.distiller is not None:
                objective.distiller.close()
        self._imitation, self.backend.reference.values = None, []
        self.policy.model.to("meta")  # type: ignore[arg-type]

    def _base_checksum(self) -> float:
        frozen = [p for p in self.policy.model.parameters() if not p.requires_grad]
        return math.fsum(parameter.sum(dtype=torch.float64).item() for parameter in frozen)

    def _load_optimizer(self, optimizer: torch.optim.AdamW, saved: dict[str, Any]) -> None:
        if self.options.offload_optimizer:
            restore(optimizer, saved)
        else:
            optimizer.load_state_dict(saved)

    def _load_adapters(self, state: dict[str, Any], folder: Path) -> None:
        if not math.isclose(state["base"], self._base_checksum(), rel_tol=1e-9):
            raise RunFolderError(
                f"{folder} holds adapters of another model than the one loaded; set model.name to the model that the "
                "run began with"
            )
        with torch.no_grad():
            for parameter, value in zip(self.parameters, state["adapters"], strict=True):
                parameter.copy_(value)
