"""What megatron-core needs to run here: without Transformer Engine, without Triton, and on a CPU.

Import this module before anything of `megatron`; call `prepare()` in each thread that runs Megatron code. Where CUDA is
available only the missing names are filled in.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from relax_gym_trainers.device import add_product

CPU = torch.device("cpu")
_PAGED_STASH = "megatron.core.transformer.moe.ops.paged_stash"


def _import_megatron() -> None:
    """Import what warns on import, silently: no Apex and no Transformer Engine is how this learner runs."""
    if importlib.util.find_spec("triton") is None:
        # From 0.19 one module imports Triton whether its kernels are used (`moe_paged_stash`) or not.
        stash: Any = types.ModuleType(_PAGED_STASH)
        stash.GLOBAL_BLOCK_SIZE, stash.paged_stash_copy_kernel, stash.paged_stash_pop_kernel = 1024, None, None
        sys.modules[_PAGED_STASH] = stash
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import megatron.core.distributed
        import megatron.core.inference.contexts
        import megatron.core.models.gpt.gpt_layer_specs
        import megatron.core.optimizer
        import megatron.core.pipeline_parallel  # noqa: F401
        from megatron.core.transformer.moe import moe_utils
    if not hasattr(moe_utils, "te_general_gemm"):
        # 0.16 asks whether it is None, but never defines it without Transformer Engine.
        moe_utils.te_general_gemm = None


_import_megatron()

from megatron.core.optimizer import clip_grads  # noqa: E402
from megatron.core.tensor_parallel import layers, mappings  # noqa: E402
from megatron.core.tensor_parallel import random as megatron_random  # noqa: E402
from megatron.core.transformer.moe import token_dispatcher  # noqa: E402


class _WeightGradients:
    """What Megatron takes from Apex to add the gradient of a matrix to a buffer as it is computed."""

    @staticmethod
    def wgrad_gemm_accum_fp32(inputs: Tensor, grad: Tensor, total: Tensor) -> None:
        """total [o, i] float32 += gradᵀ [o, t] @ inputs [t, i]."""
        add_product(total, grad.T, inputs)


if not layers._grad_accum_fusion_available:
    layers.fused_weight_gradient_mlp_cuda = _WeightGradients
    layers._grad_accum_fusion_available = True


def _scale(chunk_size: int, overflow: Tensor, tensors: list[list[Tensor]], factor: float) -> None:
    """Megatron's stand-in for Apex makes a copy of each tensor."""
    source, into = tensors
    if source is not into:
        torch._foreach_copy_(into, source)
    torch._foreach_mul_(into, factor)


def _norm(chunk_size: int, overflow: Tensor, tensors: list[list[Tensor]], *options: object) -> tuple[Tensor, None]:
    """Megatron's stand-in for Apex reads the norm of each tensor off the device."""
    return torch.nn.utils.get_total_norm(tensors[0]).float().reshape(1), None


if clip_grads.l2_norm_impl.__name__ == "local_multi_tensor_l2_norm":
    clip_grads.l2_norm_impl, clip_grads.multi_tensor_scale_impl = _norm, _scale


class CudaIsCpu(TorchFunctionMode):
    """Creates and moves tensors to the CPU where "cuda" is asked for; `Tensor.type()` names CUDA types."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # The mixed-precision and distributed optimizers compare it with "torch.cuda.FloatTensor" and the like.
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        return func(*args, **kwargs)


def _is_cuda(device: object) -> bool:
    return isinstance(device, str | torch.device) and str(device).startswith("cuda")


class _Stream:
    """A stream or an event of a device where everything has already happened."""

    def __init__(self, *args: object, **options: object) -> None: ...
    def wait_stream(self, stream: object) -> None: ...
    def wait_event(self, event: object) -> None: ...
    def record_event(self, event: object = None) -> object:
        return event or _Stream()

    def record(self, *args: object) -> None: ...
    def wait(self, *args: object) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, other: object) -> float:
        return 0.0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0


class CpuRngTracker(megatron_random.CudaRNGStatesTracker):  # type: ignore[misc]
    """Streams of random numbers by name (one for each tensor-parallel rank, …) on the CPU's generator."""

    _current_state_name: str

    def add(self, name: str, seed: int) -> None:
        self._is_initialized = True
        if seed in self.seeds_ or name in self.states_:
            raise ValueError(f"the random stream {name!r} (seed {seed}) exists already; reset the tracker first")
        self.seeds_.add(seed)
        self.states_[name] = torch.Generator().manual_seed(seed).get_state()

    @contextlib.contextmanager
    def fork(self, name: str = megatron_random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        if name not in self.states_:
            raise ValueError(f"no random stream {name!r}; streams: {', '.join(self.states_) or 'none'}")
        outside, outer = torch.get_rng_state(), self._current_state_name
        torch.set_rng_state(self.states_[name])
        self._current_state_name = name
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(outside)
            self._current_state_name = outer


_gather_evenly, _scatter_evenly = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim


def _gather(tensor: Tensor, group: Any, sizes: list[int] | None = None, use_global_buffer: bool = False) -> Any:
    """Megatron's, also for unequal sizes, which gloo's all_gather refuses."""
    if sizes is None or group.size() == 1:
        return _gather_evenly(tensor, group, None, use_global_buffer)
    padded = tensor.new_zeros(max(sizes), *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    parts = torch.split(_gather_evenly(padded, group), max(sizes))
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _scatter(tensor: Tensor, group: Any, sizes: list[int] | None = None, use_global_buffer: bool = False) -> Any:
    """Megatron's reduce-scatter, also for unequal sizes."""
    if sizes is None or group.size() == 1:
        return _scatter_evenly(tensor, group, None, use_global_buffer)
    whole = tensor.contiguous().clone()
    torch.distributed.all_reduce(whole, group=group)
    return torch.split(whole, sizes)[group.rank()]


NOISE: list[tuple[str, type[Warning]]] = [
    ("`torch.distributed.[a-z_]+` is deprecated", FutureWarning),
    ("MLP requires ffn_hidden_size", DeprecationWarning),
    ("Warning: tp_group is None", DeprecationWarning),
    ("full scope is deprecated", UserWarning),
    ("MimoModelConfig is experimental", UserWarning),
    ("If you are using transformer_engine as the transformer implementation, the core_attn", UserWarning),
    ("TypedStorage is deprecated", UserWarning),
    ("`sequence_parallel` is set to `True`, but tensor model parallel size is 1", UserWarning),
]
"""What Megatron makes torch and itself warn of, whatever its caller does."""

NOISY = (
    "megatron.core.distributed.distributed_data_parallel",  # from 0.19 that it lays gradients out itself
    "megatron.core.models.gpt.gpt_model",  # GPTModel "is deprecated"
    "megatron.core.transformer.transformer_layer",  # up to 0.16 a subclass of its MLP is an "unknown MLP type"
)
"""Modules that log warnings of their own."""

_prepared = threading.local()


def prepare() -> None:
    """Make the calling thread able to run Megatron code. Idempotent; with CUDA it only silences warnings.

    A forked child inherits it. What is replaced: the functions of `torch.cuda` that fail without a device, compilation
    (`torch.compiler` runs eagerly), Megatron's random streams, and devices named "cuda" in this thread.
    """
    for message, category in NOISE:
        warnings.filterwarnings("ignore", message, category)
    for module in NOISY:
        logging.getLogger(module).setLevel(logging.ERROR)
    if torch.cuda.is_available() or getattr(_prepared, "mode", None) is not None:
        return
    stand_ins: dict[str, object] = {
        "current_device": lambda: CPU,
        "synchronize": lambda *args, **options: None,
        "current_stream": _Stream,
        "Stream": _Stream,
        "Event": _Stream,
        "stream": lambda stream: contextlib.nullcontext(),
    }
    for name, value in stand_ins.items():
        setattr(torch.cuda, name, value)
    torch.compiler.set_stance("force_eager")  # else functions of a few lines go through a C++ compiler
    if not isinstance(megatron_random._CUDA_RNG_STATE_TRACKER, CpuRngTracker):
        megatron_random._CUDA_RNG_STATE_TRACKER = CpuRngTracker()
        megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    # Recompute keeps the device's random state; split sizes must leave tensors even if these are on the CPU already.
    megatron_random._get_cuda_rng_state = lambda *args, **options: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *args, **options: torch.set_rng_state(state)
    token_dispatcher.maybe_move_tensor_to_cpu = _as_numpy
    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = _gather, _scatter
    # Advice on the order of kernels on a GPU.
    warnings.filterwarnings("ignore", "When using (sequence parallelism|async grad allreduce) it is rec", UserWarning)
    _prepared.mode = CudaIsCpu()
    _prepared.mode.__enter__()


def _as_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


@contextlib.contextmanager
def prepared() -> Iterator[None]:
    """`prepare()`, and tensors of this thread on their own devices again afterwards."""
    nested = getattr(_prepared, "mode", None) is not None
    prepare()
    try:
        yield
    finally:
        if not nested and (mode := getattr(_prepared, "mode", None)) is not None:
            mode.__exit__(None, None, None)
            _prepared.mode = None
