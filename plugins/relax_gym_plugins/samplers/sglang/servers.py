"""Members of a fleet: servers that were launched here, and servers that others run."""

from __future__ import annotations

import os
import sys

import torch

from relax_gym.context import RunContext
from relax_gym.errors import ConfigError
from relax_gym_plugins.samplers.sglang import wire_video
from relax_gym_plugins.samplers.sglang.engine import Engine
from relax_gym_plugins.samplers.sglang.fleet import Member
from relax_gym_plugins.samplers.sglang.options import SGLangSamplerOptions
from relax_gym_plugins.samplers.sglang.process import ServerProcess
from relax_gym_plugins.samplers.sglang.weights import gpus

RAW_LOGPROBS = "SGLANG_RETURN_ORIGINAL_LOGPROB"
VISIBLE = "CUDA_VISIBLE_DEVICES"
RANKS = (("base_gpu_id", 0), ("gpu_id_step", 1), ("tp_size", 1))
"""Arguments of a server that say which GPUs its ranks take, and their defaults."""


def attach(url: str, options: SGLangSamplerOptions) -> Member:
    """A server that runs already. Raises ConfigError when its key is not in the environment."""
    headers, name = {}, options.api_key_env
    if name:
        if not (key := os.environ.get(name)):
            raise ConfigError(f"sampler.api_key_env names {name}, which is not set; export the servers' key in it")
        headers["Authorization"] = f"Bearer {key}"
    engine = Engine(url, headers=headers, ca_file=options.ca_file)
    return Member(engine, connect=engine.connect, close=engine.aclose)


def launch(number: int, options: SGLangSamplerOptions, context: RunContext, *, devices: str | None) -> Member:
    """A server of our own, on GPUs as in CUDA_VISIBLE_DEVICES, None for all. `connect` starts it, again too.

    Raises:
        ConfigError: its environment or arguments are wrong.
    """
    if {**os.environ, **options.env}.get(RAW_LOGPROBS, "").lower() in ("1", "true", "yes", "y"):
        raise ConfigError(
            f"{RAW_LOGPROBS} makes servers leave the temperature out of log-probs, so that no learner agrees; unset it"
        )
    arguments: dict[str, object] = {}
    if options.routed_experts:
        arguments["enable_return_routed_experts"] = True
    if options.colocate and options.server_args.get("device") != "cpu":  # which has none to free
        arguments["enable_memory_saver"] = True
    media: dict[str, str] = {}
    if context.processor is not None:
        media["SGLANG_VLM_CACHE_SIZE_MB"] = "0"  # it would keep what older weights made of an image
        if "video" in context.processor.tokens:
            arguments |= wire_video.ARGUMENTS
    visible = {} if devices is None else {VISIBLE: devices}
    environment = {**media, **visible, **options.env}
    process = ServerProcess(
        options.python or sys.executable,
        context.model_path,
        {**arguments, **options.server_args},
        log=context.run_dir / "sglang" / f"server-{number}.log",
        env=environment,
        timeout=options.launch_timeout,
    )
    engine = Engine(f"server {number}")
    engine.devices = _gpus(options, environment.get(VISIBLE))

    async def connect() -> None:
        await process.start()
        await engine.move(process.url, process.headers)
        await engine.connect()

    async def close() -> None:
        await engine.aclose()
        await process.stop()

    return Member(engine, connect=connect, close=close, launched=True, devices=devices)


def _gpus(options: SGLangSamplerOptions, visible: str | None) -> tuple[str, ...]:
    """Those that the ranks of a launched server take of the `visible` ones, None for the learner's. Raises ConfigError
    when the learner cannot fill memory there that is freed now and then."""
    names = gpus.visible() if visible is None else gpus.named(visible)
    number = {name.replace("-", "_"): value for name, value in options.server_args.items()}
    first, step, ranks = (int(number.get(name) or usual) for name, usual in RANKS)
    own = tuple(names[first::step][:ranks])
    unseen = [name for name in own if gpus.ordinal(name) is None]
    if unseen and options.colocate and torch.cuda.is_available():
        raise ConfigError(
            f"an SGLang server is to have GPU {unseen[0]}, which the learner does not see (it sees {gpus.visible()}): "
            "with colocate it must, to bring weights there; add it to CUDA_VISIBLE_DEVICES of relax-gym, or name "
            "another in sampler.devices"
        )
    return own
