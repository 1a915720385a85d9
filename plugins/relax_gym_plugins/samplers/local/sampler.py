"""The asyncio face of the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from relax_gym.context import RunContext
from relax_gym.errors import ConfigError, SamplerError
from relax_gym.models import load_language_model
from relax_gym.sampler import Sampler, SamplingParams, Session, Weights
from relax_gym.types import Completion, Placed
from relax_gym_plugins.samplers.local.contexts import Context
from relax_gym_plugins.samplers.local.engine import LocalEngine
from relax_gym_plugins.samplers.local.options import LocalSamplerOptions


class LocalSampler(Sampler):
    """Samples from a model in this process. See `LocalSamplerOptions` for what can be chosen."""

    def __init__(self, context: RunContext, options: LocalSamplerOptions) -> None:
        self._context, self._options = context, options
        self._engine: LocalEngine | None = None
        self._closed = False

    @classmethod
    def from_engine(cls, engine: LocalEngine) -> LocalSampler:
        """Serve an engine that was built elsewhere; `start` starts it."""
        sampler = cls.__new__(cls)
        sampler._engine, sampler._closed = engine, False
        return sampler

    @property
    def engine(self) -> LocalEngine:
        """The engine, once `start` has built it."""
        if self._engine is None:
            state = "closed; build a new one" if self._closed else "not started; await start() first"
            raise SamplerError(f"the local sampler is {state}")
        return self._engine

    @property
    def version(self) -> int:
        """See `Sampler.version`."""
        return -1 if self._engine is None else self._engine.version

    @property
    def max_context(self) -> int:
        """See `Sampler.max_context`."""
        return self.engine.max_context

    async def start(self) -> None:
        """Load the model and start the engine's thread."""
        if self._engine is None:
            self._engine = await asyncio.to_thread(self._load)
        self._engine.start()

    def _load(self) -> LocalEngine:
        model = load_model(self._context.model_path, self._options, self._context.config.model.trust_remote_code)
        return LocalEngine(
            model,
            self._context.tokenizer,
            self._options,
            seed=self._context.config.seed,
            processor=self._context.processor,
        )

    def open_session(self) -> Session:
        """See `Sampler.open_session`. Sessions are served in the order of these calls."""
        return LocalSession(self.engine)

    async def update_weights(self, weights: Weights, version: int) -> None:
        """See `Sampler.update_weights`; requests in flight go on with the new weights."""
        named = await asyncio.to_thread(dict, weights)
        await asyncio.wrap_future(self.engine.update_weights(named, version))

    async def aclose(self) -> None:
        """Stop the engine and let go of the model; pending requests fail."""
        engine, self._engine, self._closed = self._engine, None, True
        if engine is not None:
            await asyncio.to_thread(engine.stop)

    def metrics(self) -> Mapping[str, float]:
        """Tokens prefilled, reused and generated, forward steps, and seconds sampling and waiting for environments."""
        return {} if self._engine is None else self._engine.metrics()


class LocalSession(Session):
    """One episode; its keys and values stay in the cache between turns."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self._context: Context = engine.open()

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, media: Sequence[Placed] = ()
    ) -> Completion:
        """See `Session.generate`."""
        return await asyncio.wrap_future(self._engine.submit(self._context, prompt_ids, params, media))

    def close(self) -> None:
        """See `Session.close`; a request in flight returns what it has, as aborted."""
        self._engine.close(self._context)


def load_model(path: Path, options: LocalSamplerOptions, trust_remote_code: bool = False) -> PreTrainedModel:
    """Load a causal language model for sampling."""
    device = choose_device(options.device)
    dtype = choose_dtype(options.dtype, device)
    model = load_language_model(path, dtype=dtype, trust_remote_code=trust_remote_code)
    torch.nn.Module.to(model, device)
    return model


def choose_device(name: str) -> torch.device:
    """Resolve "auto". Raises ConfigError for a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"sampler.device = {name!r}: {error}; use auto, cpu or a device that torch can see"
        ) from error
    return torch.device(name)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Resolve "auto": bfloat16 where the hardware multiplies in it."""
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" or _cpu_multiplies_bfloat16() else "float32"
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


def _cpu_multiplies_bfloat16() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags
