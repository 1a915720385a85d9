"""Who is asked: a model behind an endpoint, or one that a sampler of the judge's own serves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from relax_gym.config import ModelConfig, SamplerSection, validate
from relax_gym.endpoint.client import Endpoint, EndpointConfig
from relax_gym.endpoint.own import OwnModel
from relax_gym.errors import RewardError, suggestion
from relax_gym.sampler import SamplingParams

SAMPLED = ("top_p", "top_k", "min_p", "stop", "chat_template_kwargs")


@dataclass(eq=False)
class _Line:
    endpoint: Endpoint
    turns: asyncio.Semaphore
    users: int = 0


class ByEndpoint:
    """A client for each event loop that asks, closed when it has nothing more to ask: rewards may be asked in many."""

    def __init__(self, config: EndpointConfig, most: int) -> None:
        """Raises ConfigError when there is no such address or key."""
        Endpoint(config)
        self._config, self._most = config, most
        self._open: dict[asyncio.AbstractEventLoop, _Line] = {}

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[Endpoint]:
        """The client of this loop, when it is free for one more request."""
        loop = asyncio.get_running_loop()
        if loop not in self._open:
            self._open[loop] = _Line(Endpoint(self._config), asyncio.Semaphore(self._most))
        line = self._open[loop]
        line.users += 1
        try:
            async with line.turns:
                yield line.endpoint
        finally:
            line.users -= 1
            if not line.users:
                del self._open[loop]
                await line.endpoint.aclose()

    def start(self) -> None:
        """Nothing has to be loaded."""

    def close(self) -> None:
        """They are closed already."""


class BySampler:
    """The judge's own sampler and model; `start` loads it."""

    def __init__(
        self,
        model: str | Mapping[str, Any],
        sampler: Mapping[str, Any],
        body: Mapping[str, Any],
        *,
        most: int,
        deadline: float,
    ) -> None:
        """Raises ConfigError or RewardError for what sampler, model or sampling do not take."""
        given, more = {"name": model} if isinstance(model, str) else model, dict(body)
        for key in more.keys() - {"temperature", "max_tokens", *SAMPLED}:
            raise RewardError(f"genrm: with a sampler, body has no {key!r}{suggestion(key, SAMPLED)}")
        template = more.pop("chat_template_kwargs", {})
        try:
            stop = tuple(more.pop("stop", ()))
            params = SamplingParams(max_new_tokens=more.pop("max_tokens"), stop=stop, **more)
        except ValueError as error:
            raise RewardError(f"genrm: {error}") from error
        self._own = OwnModel(
            validate(ModelConfig, given, source="reward", prefix="model"),
            validate(SamplerSection, sampler, source="reward", prefix="sampler"),
            params,
            template_kwargs=template,
            most=most,
            deadline=deadline,
        )

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[OwnModel]:
        """It; it limits itself."""
        yield self._own

    def start(self) -> None:
        """Load it."""
        self._own.start()

    def close(self) -> None:
        """Free it."""
        self._own.close()
