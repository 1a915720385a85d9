"""One process, one device, any Hugging Face causal LM."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relax_gym.algorithm import Algorithm
from relax_gym.config import load_algorithms
from relax_gym.context import RunContext
from relax_gym.errors import RunFolderError
from relax_gym.learner import Learner
from relax_gym.sampler import Weights
from relax_gym.types import Batch, Metrics, TrainingSample
from relax_gym_trainers.torch_learner import model as models
from relax_gym_trainers.torch_learner.distillation import load_distiller
from relax_gym_trainers.torch_learner.objectives import Objective, Piece
from relax_gym_trainers.torch_learner.optimizer import apply_gradient, build_optimizer, learning_rate
from relax_gym_trainers.torch_learner.options import TorchLearnerOptions
from relax_gym_trainers.torch_learner.policy import Policy
from relax_gym_trainers.torch_learner.update import (
    Tally,
    accumulate_imitation_gradient,
    check_sampled,
    plan,
)

STATE_FILE = "learner_state.pt"


class TorchLearner(Learner):
    """Trains float32 weights with AdamW; arithmetic in `options.dtype`.

    A step's batch is cut by groups into `updates_per_step` parts, one optimizer update each, gone through `epochs`
    times. An update's loss is aggregated over all trained tokens of its part, however that is cut into micro-batches.
    """

    def __init__(self, context: RunContext, options: TorchLearnerOptions) -> None:
        """Load the model of `context.model_path`; algorithm, temperature and length of the run come from the config.

        Raises:
            ConfigError: options that contradict each other or the machine.
            ModelError: the model cannot be loaded or gives non-finite numbers.
        """
        config = context.config
        self.options = options
        algorithms = load_algorithms(config)
        self._total_steps = config.train.steps
        self._trust_remote_code = config.model.trust_remote_code
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
        self.objectives = self._build_objectives(algorithms, context)
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = build_optimizer(self.parameters, options)
        self.version = 0
        self._imitation: torch.optim.AdamW | None = None
        self._reference: list[Tensor] = []
        self._reference_moved = False
        if any(algorithm.needs_reference for algorithm in algorithms):
            self._take_reference()

    def step(self, batch: Batch) -> Metrics:
        """One step on the global batch. A batch without any gradient changes no weight. A KL is that to the model
        as it was before the first step, i.e. after the warm-up if there was one.

        Returns:
            `loss`, `grad_norm` (before clipping; means over the updates), `lr`, `updates`, `seconds`; `trained_tokens`
            of the batch, `padded_tokens` that one epoch's forward passes compute, pads included, `prefix_saved_tokens`
            that they need not, thanks to shared prompts. When something was trained also, as means over its tokens:
            `entropy` in nats, `ratio_mean` of π/π_old, `clip_fraction` (share of the tokens with an advantage that the
            algorithm gave no gradient), what KL, teachers and corrections add (`kl`, `kl_reward`, `opd_kl`,
            `teacher_logprob`, `correction_weight`, `correction_dropped`); and, for the tokens of the first update that
            were scored, whose number is `logprob_diff_tokens`, the gap between learner and sampler:
            `logprob_diff_mean`, `_max`, `_k3`, `_clipped`.

        Raises:
            TrainingError: loss, gradient or a log-prob of the sampler is not finite; the update that found it changed
                nothing.
        """
        started = time.perf_counter()
        check_sampled(batch.samples, step=self.version + 1)
        self._leave_warmup()
        lr = learning_rate(self.options, self.version, self._total_steps)
        tally, losses, norms = Tally(), list[float](), list[float]()
        updates = self._plan(batch.samples, tally)
        for _ in range(self.options.epochs):
            for pieces in updates:
                self.optimizer.zero_grad()
                first = not losses
                losses.append(sum(p.accumulate(tally=tally, first=first, step=self.version + 1) for p in pieces))
                norms.append(self._apply(self.optimizer, lr))
        parts = [piece.part for pieces in updates for piece in pieces]
        self.version += 1
        return {
            "loss": float(np.mean(losses)) if losses else 0.0,
            "grad_norm": float(np.mean(norms)) if norms else 0.0,
            "lr": lr,
            "updates": float(len(losses)),
            "trained_tokens": float(batch.trained_tokens),
            "padded_tokens": float(sum(b.padded_tokens for part in parts for b in part.micro_batches)),
            "prefix_saved_tokens": float(sum(part.saved_tokens for part in parts)),
            "logprob_diff_tokens": float(tally.counts["logprob_diff_mean"]),
            **tally.metrics(),
            "seconds": time.perf_counter() - started,
        }

    def imitate(self, batch: Batch, *, lr: float) -> Metrics:
        """One supervised step at the run's temperature, with an optimizer of its own that the first `step` drops."""
        if self._imitation is None:
            self._imitation = build_optimizer(self.parameters, self.options)
        part = plan(
            batch.samples,
            budget=self.options.micro_batch_tokens,
            share_prefix=self.policy.share_prefix,
            skip_flat=False,
            pair_cost=self.policy.pair_cost,
        )
        if not part.total_tokens:
            return {"loss": 0.0, "grad_norm": 0.0, "trained_tokens": 0.0}
        self._imitation.zero_grad()
        loss = accumulate_imitation_gradient(self.policy, part, step=self.version + 1)
        norm = self._apply(self._imitation, lr)
        return {"loss": loss, "grad_norm": norm, "trained_tokens": float(part.total_tokens)}

    def weights(self) -> Weights:
        """Views of the float32 weights; with LoRA, new tensors with the adapters merged in."""
        return models.plain_weights(self.policy.model)

    def export(self, folder: Path) -> None:
        """Write float32 safetensors, adapters merged."""
        models.export_model(self.policy.model, folder, adapted=self.options.lora is not None)

    def save_state(self, folder: Path) -> None:
        """Write optimizer, version, random state and, with LoRA, the adapters."""
        folder.mkdir(parents=True, exist_ok=True)
        state = {
            "version": self.version,
            "optimizer": self.optimizer.state_dict(),
            "imitation": self._imitation.state_dict() if self._imitation else None,
            "reference": self._reference if self._reference_moved else None,
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
        state: dict[str, Any] = torch.load(folder / STATE_FILE, map_location=self.policy.device, weights_only=True)
        if (state["adapters"] is not None) != (self.options.lora is not None):
            raise RunFolderError(f"{folder} was trained {'with' if state['adapters'] else 'without'} learner.lora")
        if state["adapters"] is None:
            saved = models.load_model(folder, trust_remote_code=self._trust_remote_code)
            self.policy.model.load_state_dict(saved.state_dict())
        else:
            self._load_adapters(state, folder)
        self.version = state["version"]
        self.optimizer.load_state_dict(state["optimizer"])
        self._imitation = None
        if state["imitation"]:
            self._imitation = build_optimizer(self.parameters, self.options)
            self._imitation.load_state_dict(state["imitation"])
        if state["reference"]:
            self._reference, self._reference_moved = state["reference"], True
        torch.set_rng_state(state["rng"].cpu())
        if state["cuda_rng"]:
            torch.cuda.set_rng_state_all([value.cpu() for value in state["cuda_rng"]])

    def close(self) -> None:
        """Drop weights and optimizer state. Idempotent."""
        self.optimizer.state.clear()
        for objective in self.objectives:
            if objective.distiller is not None:
                objective.distiller.close()
        self._imitation, self._reference = None, []
        self.policy.model.to("meta")  # type: ignore[arg-type]

    def _apply(self, optimizer: torch.optim.AdamW, lr: float) -> float:
        return apply_gradient(optimizer, lr=lr, clip=self.options.grad_clip, step=self.version + 1)

    def _build_objectives(self, algorithms: Sequence[Algorithm], context: RunContext) -> list[Objective]:
        """One for each `[[env]]`; envs with the same algorithm and weight share theirs."""
        distillers = {
            id(algorithm): load_distiller(algorithm.distillation, context, self.options, self.policy)
            for algorithm in {id(algorithm): algorithm for algorithm in algorithms}.values()
        }
        built: dict[tuple[int, float], Objective] = {}
        for algorithm, env in zip(algorithms, context.config.env, strict=True):
            key = id(algorithm), env.loss_weight
            built[key] = built.get(key) or Objective(
                algorithm=algorithm,
                distiller=distillers[id(algorithm)],
                loss_weight=env.loss_weight,
                policy=self.policy,
                options=self.options,
                as_reference=self._as_reference,
            )
        return [built[id(a), env.loss_weight] for a, env in zip(algorithms, context.config.env, strict=True)]

    def _by_objective(self, samples: Sequence[TrainingSample]) -> dict[Objective, list[int]]:
        """Indices of the samples of each objective."""
        out: dict[Objective, list[int]] = {}
        for index, sample in enumerate(samples):
            out.setdefault(self.objectives[sample.mixture], []).append(index)
        return out

    def _plan(self, samples: Sequence[TrainingSample], tally: Tally) -> list[list[Piece]]:
        """The pieces of each optimizer update of an epoch; what has nothing to learn from is left out."""
        shaped = list(samples)
        for objective, own in self._by_objective(samples).items():
            for index, sample in zip(own, objective.shape([samples[index] for index in own], tally), strict=True):
                shaped[index] = sample
        only = self.options.updates_per_step * self.options.epochs == 1
        updates = []
        for update in split_by_group(shaped, self.options.updates_per_step):
            groups = self._by_objective(update).items()
            pieces = [objective.piece([update[i] for i in own], update, only=only) for objective, own in groups]
            updates.append([piece for piece in pieces if piece.part.micro_batches])
        return [pieces for pieces in updates if pieces]

    @contextlib.contextmanager
    def _as_reference(self) -> Iterator[None]:
        """The policy has the reference's trainable weights inside; all others never change."""
        current = [parameter.data for parameter in self.parameters]
        for parameter, value in zip(self.parameters, self._reference, strict=True):
            parameter.data = value
        try:
            yield
        finally:
            for parameter, value in zip(self.parameters, current, strict=True):
                parameter.data = value

    def _take_reference(self) -> None:
        self._reference = [parameter.detach().clone() for parameter in self.parameters]

    def _leave_warmup(self) -> None:
        if self._imitation is None:
            return
        self._imitation = None
        if self.version == 0 and self._reference:
            self._take_reference()
            self._reference_moved = True

    def _base_checksum(self) -> float:
        frozen = [p for p in self.policy.model.parameters() if not p.requires_grad]
        return math.fsum(parameter.sum(dtype=torch.float64).item() for parameter in frozen)

    def _load_adapters(self, state: dict[str, Any], folder: Path) -> None:
        if not math.isclose(state["base"], self._base_checksum(), rel_tol=1e-9):
            raise RunFolderError(
                f"{folder} holds adapters of another model than the one loaded; set model.name to the model that the "
                "run began with"
            )
        with torch.no_grad():
            for parameter, value in zip(self.parameters, state["adapters"], strict=True):
                parameter.copy_(value)


def split_by_group(samples: Sequence[TrainingSample], parts: int) -> list[list[TrainingSample]]:
    """Cut samples into `parts` runs of whole groups, groups in order of appearance, sizes as equal as they can be."""
    groups: dict[str, list[TrainingSample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_id, []).append(sample)
    chunks = np.array_split(np.arange(len(groups)), parts)
    ordered = list(groups.values())
    return [[sample for index in chunk for sample in ordered[index]] for chunk in chunks]
