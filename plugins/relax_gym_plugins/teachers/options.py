"""Options of the teacher engine `sglang`. Imports no torch, so that a config can be checked quickly."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from relax_gym.config import Options, RunConfig
from relax_gym.errors import ConfigError
from relax_gym_plugins.samplers.sglang.options import SGLangSamplerOptions


class SGLangTeacherOptions(Options):
    """`teacher_engine = { name = "sglang", … }`: teachers on SGLang servers, launched for the run or attached to."""

    may_change = (
        *("urls", "engines", "server_args", "python", "env", "devices", "api_key_env", "ca_file", "launch_timeout"),
        *("request_timeout", "retries", "concurrency"),
    )

    urls: dict[str, tuple[str, ...]] = Field(
        default_factory=dict,
        description="servers that run already, by the teacher's model name; for a teacher without, some are launched",
    )
    engines: int = Field(1, ge=1, description="servers to launch for each teacher that has no urls")
    server_args: dict[str, Any] = Field(default_factory=dict, description="as of the sampler")
    python: str | None = Field(None, description="interpreter that has SGLang installed; default: this one")
    env: dict[str, str] = Field(default_factory=dict, description="environment variables of launched servers")
    devices: tuple[str, ...] = Field((), description="CUDA_VISIBLE_DEVICES of each launched server of a teacher")
    api_key_env: str | None = Field(None, description="environment variable that holds the key of attached servers")
    ca_file: str | None = Field(None, description="certificates to trust in https URLs; default: the system's")
    launch_timeout: float = Field(900.0, gt=0, description="seconds until a launched server must be ready")
    request_timeout: float = Field(600.0, gt=0, description="seconds that the scores of one sample may take")
    retries: int = Field(3, ge=0, description="times that a failed request is sent again, to another server if any")
    concurrency: int = Field(64, ge=1, description="most requests of a teacher at once")

    @model_validator(mode="after")
    def _check_servers(self) -> SGLangTeacherOptions:
        if self.api_key_env and not self.urls:
            raise ValueError("api_key_env is for servers in urls; launched ones get a key of their own")
        for model in self.urls:
            self.servers(model)
        self.servers("")
        return self

    def servers(self, model: str) -> SGLangSamplerOptions:
        """How the sampler would be told of the servers of a teacher."""
        shared = {name: getattr(self, name) for name in ("ca_file", "launch_timeout", "request_timeout", "retries")}
        if urls := self.urls.get(model):
            return SGLangSamplerOptions(urls=urls, api_key_env=self.api_key_env, **shared)
        launched = {name: getattr(self, name) for name in ("engines", "server_args", "python", "env", "devices")}
        return SGLangSamplerOptions(**launched, **shared)

    def check_run(self, config: RunConfig) -> None:
        """See `Options.check_run`."""
        if config.rollout.temperature != 1.0:
            raise ConfigError(
                f"teacher_engine 'sglang' with rollout.temperature = {config.rollout.temperature:g}: SGLang gives "
                'log-probs of prompts at temperature 1 only; set that, or take teacher_engine = "local"'
            )
