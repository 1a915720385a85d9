"""Options of the SGLang sampler. Imports no torch, so that a config can be checked quickly."""

from __future__ import annotations

import re
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from relax_gym.config import Options, RunConfig
from relax_gym.errors import ConfigError


class SGLangSamplerOptions(Options):
    """`[sampler] name = "sglang"`: rollouts on SGLang servers, launched for the run or attached to by URL."""

    may_change = (
        *("engines", "urls", "server_args", "python", "env", "devices", "api_key_env", "ca_file", "launch_timeout"),
        *("request_timeout", "update_timeout", "retries", "sync", "verify_weights", "colocate"),
    )

    engines: int = Field(1, ge=1, description="servers to launch; ignored with urls")
    urls: tuple[str, ...] = Field(
        (), description="servers that run already, e.g. http://10.0.0.5:30000; none is launched"
    )
    server_args: dict[str, Any] = Field(
        default_factory=dict,
        description="arguments of `python -m sglang.launch_server`, e.g. {tp_size = 2, dtype = 'bfloat16'}",
    )
    python: str | None = Field(None, description="interpreter that has SGLang installed; default: this one")
    env: dict[str, str] = Field(default_factory=dict, description="environment variables of launched servers")
    devices: tuple[str, ...] = Field(
        (),
        description="CUDA_VISIBLE_DEVICES of each launched server, e.g. ['0,1', '2,3'], then of those that may join; "
        "default: all see the same",
    )
    api_key_env: str | None = Field(None, description="environment variable that holds the key of attached servers")
    ca_file: str | None = Field(None, description="certificates to trust in https URLs; default: the system's")
    max_context: int | None = Field(None, ge=2, description="most tokens of a prompt with its completion")
    launch_timeout: float = Field(900.0, gt=0, description="seconds until a launched server must be ready")
    request_timeout: float = Field(1800.0, gt=0, description="seconds that one completion may take")
    update_timeout: float = Field(600.0, gt=0, description="seconds that one weight update may take")
    retries: int = Field(
        3, ge=0, description="times that a failed request is sent again, to another server if there is one"
    )
    sync: Literal["auto", "disk", "ipc", "broadcast"] = Field(
        "auto", description="how weights travel; auto is ipc to launched servers, disk to attached ones"
    )
    on_update: Literal["abort", "retract", "keep"] = Field(
        "abort",
        description="requests in flight at a weight update: abort keeps their tokens and asks for the rest afterwards, "
        "retract computes keys and values anew, keep goes on with the old ones",
    )
    verify_weights: bool = Field(False, description="compare checksums of all servers after every update")
    colocate: bool = Field(False, description="free the servers' GPU memory while the learner trains")
    routed_experts: bool = Field(False, description="record the experts of mixture-of-experts models, for replay")

    @field_validator("urls")
    @classmethod
    def _check_urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"{url!r} is no URL of a server; write it like http://10.0.0.5:30000")
        if len(set(urls)) < len(urls):
            raise ValueError("a URL is given twice")
        return tuple(url.rstrip("/") for url in urls)

    @field_validator("api_key_env")
    @classmethod
    def _check_name(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError("give the name of an environment variable, not the key itself")
        return name

    @model_validator(mode="after")
    def _check_together(self) -> SGLangSamplerOptions:
        if self.urls:
            launching = {
                "server_args": self.server_args,
                "python": self.python,
                "env": self.env,
                "devices": self.devices,
            }
            if given := [name for name, value in launching.items() if value]:
                raise ValueError(f"{' and '.join(given)} are for launched servers; leave them out with urls")
        elif self.api_key_env:
            raise ValueError("api_key_env is for servers in urls; launched ones get a key of their own")
        if self.devices and len(self.devices) < self.engines:
            raise ValueError(f"devices has {len(self.devices)} entries for {self.engines} engines; give one for each")
        return self

    def check_run(self, config: RunConfig) -> None:
        """See `Options.check_run`."""
        train = config.train
        if self.colocate and not train.on_policy:
            raise ConfigError(
                f"sampler.colocate with train.max_staleness = {train.max_staleness} and train.update_every = "
                f"{train.update_every}: servers cannot sample while their memory is freed; set max_staleness = 0 and "
                "update_every = 1"
            )

    def context_limit(self, positions: int | None) -> int | None:
        """See `Options.context_limit`."""
        if self.max_context and positions and self.max_context > positions:
            raise ConfigError(f"sampler.max_context = {self.max_context}: the model has only {positions} positions")
        return self.max_context or positions
