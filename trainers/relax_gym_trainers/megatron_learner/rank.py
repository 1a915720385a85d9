"""What each rank of the Megatron learner does: all of them the same, at the same time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relax_gym.config import load_algorithms
from relax_gym.context import RunContext
from relax_gym.models import language_config, language_prefix
from relax_gym.sampler import Weights
from relax_gym.types import Batch, Metrics
from relax_gym_trainers.host_state import HostState
from relax_gym_trainers.megatron_learner import hf, lora, model
from relax_gym_trainers.megatron_learner.backend import Head, MegatronBackend
from relax_gym_trainers.megatron_learner.checkpoint import Checkpointer
from relax_gym_trainers.megatron_learner.distillation import load_distiller
from relax_gym_trainers.megatron_learner.optimizer import (
    add_up,
    apply_gradient,
    build_optimizer,
    forget,
    inner,
    wrap,
)
from relax_gym_trainers.megatron_learner.options import MegatronLearnerOptions
from relax_gym_trainers.megatron_learner.parallel import Layout, destroy, initialise
from relax_gym_trainers.megatron_learner.ranks import Place
from relax_gym_trainers.megatron_learner.towers import MediaReader, freeze_encoders, text_config
from relax_gym_trainers.model_folder import write_folder
from relax_gym_trainers.policy_learner import PolicyLearner
from relax_gym_trainers.torch_learner.model import choose_device, choose_dtype
from relax_gym_trainers.torch_learner.objectives import build_objectives

RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": []},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
BUCKET_BYTES = 1 << 28
LAYOUT = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp", "sequence_parallel")


def layout_of(options: MegatronLearnerOptions) -> Layout:
    """The sizes of the parallel groups."""
    return Layout(**{name: getattr(options, name) for name in LAYOUT})


class RankLearner(PolicyLearner):
    """One rank's share of a learner. Every method is called on all ranks at the same time."""

    options: MegatronLearnerOptions
    backend: MegatronBackend
    _warming_up = _reference_moved = False

    def __init__(self, place: Place, context: RunContext, options: MegatronLearnerOptions) -> None:
        """Join the other ranks and load this one's share of the model."""
        config = context.config
        self.options, self.layout = options, layout_of(options)
        self.total_steps, self.version = config.train.steps, 0
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        initialise(self.layout, place.rank, place.init_method, backend, seed=config.seed, timeout=options.patience)
        whole = language_config(context.model_path)
        self._config = text_config(whole)
        self._dtype = choose_dtype(options.dtype, choose_device("auto"))
        chunks = model.from_folder(
            context.model_path,
            self._config,
            self.layout,
            self._dtype,
            whole=whole,
            calculate_per_token_loss=True,
            gradient_accumulation_fusion=True,
            **RECOMPUTE[options.recompute],
        )
        if options.freeze_encoders:
            freeze_encoders(chunks, self._config)
        if options.lora is not None:
            encoders = {"freeze_encoders": options.freeze_encoders}
            lora.adapt(chunks, self._config, whole, self.layout, options.lora, seed=config.seed, **encoders)
        wrapped = wrap(chunks, options)
        self.optimizer = build_optimizer(wrapped, options, self._dtype)
        self._host_state = HostState(inner(self.optimizer), chunks) if options.offload_optimizer else None
        head = Head(
            vocabulary=self._config.vocab_size,
            temperature=config.rollout.temperature,
            never=context.never_sampled,
            chunk=options.logprob_chunk,
            dtype=self._dtype,
        )
        reader = MediaReader(context.processor, whole) if context.processor is not None else None
        self.backend = MegatronBackend(wrapped, self.layout, options, head, reader)
        self.objectives = build_objectives(
            load_algorithms(config), config, self.backend, lambda taught: load_distiller(taught, context, self.backend)
        )
        self._source = context.model_path
        self._export = hf.Export(chunks, self._config, prefix=language_prefix(self._source), bucket_bytes=BUCKET_BYTES)
        self._gathering, self._writes = iter(self._export), place.rank == 0
        control = self.backend.control
        adapters = lora.facts(chunks, self._config, options, context.model_path, control)
        self._checkpointer = Checkpointer(
            chunks, self.optimizer, self._config, self.backend.reference, control, str(self.layout), adapters
        )
        if any(objective.algorithm.needs_reference for objective in self.objectives):
            self.backend.reference.take()

    def apply(self, lr: float, *, imitation: bool = False) -> float:
        """See `PolicyLearner.apply`."""
        self._warming_up |= imitation
        add_up(self.backend.chunks)
        with contextlib.nullcontext() if self._host_state is None else self._host_state.on_device():
            return apply_gradient(self.optimizer, lr=lr, clip=self.options.grad_clip, step=self.version + 1)

    def leave_warmup(self) -> None:
        """See `PolicyLearner.leave_warmup`."""
        if self._warming_up:
            forget(self.optimizer)
            self._warming_up = False
            if self.version == 0 and self.backend.reference.values:
                self.backend.reference.take()
                self._reference_moved = True

    def imitate_at(self, batch: Batch, lr: float) -> Metrics:
        """`imitate`."""
        return self.imitate(batch, lr=lr)

    def rest(self) -> None:
        """Give a GPU the gradients' buffers and what torch keeps of it for the next step."""
        if torch.cuda.is_available():
            for chunk in self.backend.chunks:
                chunk.offload_grad_buffers()

    def weights(self) -> Weights:
        """All weights on every rank, gathered in buckets."""
        return iter(self._export)

    def begin_weights(self) -> None:
        """The first of `next_weights` follow."""
        self._gathering = iter(self._export)

    def next_weights(self, nbytes: int) -> list[tuple[str, Tensor]]:
        """`nbytes` or a little more of the weights that follow; nothing after the last."""
        some, size = [], 0
        for name, tensor in self._gathering:
            some.append((name, tensor))
            size += tensor.nbytes
            if size >= nbytes:
                break
        return some if self._writes else []

    def export(self, folder: Path) -> None:
        """See `Learner.export`. Rank 0 writes."""
        write_folder(self._export, self._source, folder if self._writes else None)

    def save_state(self, folder: Path) -> None:
        """Begin to write the state into the folder, and with `checkpoint_model` a model folder; `finish_save` waits for
        it."""
        self._checkpointer.save(
            folder,
            self._source if self._writes else None,
            reference=self._reference_moved,
            model=self._model_writer(folder) if self.options.checkpoint_model else None,
            version=self.version,
            warming_up=self._warming_up,
            dtype=str(self._dtype).removeprefix("torch."),
            model_folder=str(self._source),
        )

    def _model_writer(self, folder: Path) -> Callable[[], None] | None:
        """On the rank that writes, what will write the weights of now; they wait in host memory."""
        if not self._writes:
            for _ in self._export:
                pass
            return None
        weights = [(name, tensor.to("cpu", copy=True)) for name, tensor in self._export]
        return partial(write_folder, weights, self._source, folder)

    def finish_save(self) -> None:
        """See `Checkpointer.finish`."""
        self._checkpointer.finish()

    def load(self, folder: Path) -> None:
        """See `Learner.load` and `Checkpointer.load`."""
        self.load_state(folder)

    def load_state(self, folder: Path) -> int:
        """`load`. Returns the version."""
        facts = self._checkpointer.load(folder)
        self.version, self._warming_up = facts["version"], facts["warming_up"]
        self._reference_moved = facts["reference"]
        if self._host_state is not None:
            self._host_state.leave()
        return self.version

    def close(self) -> None:
        """Leave the other ranks, and end the teachers' engines."""
        for objective in self.objectives:
            if objective.distiller is not None:
                objective.distiller.close()
        destroy()
