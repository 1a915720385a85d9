"""Several processes that run one command, as torchrun starts them: the first trains, the others serve its learner."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from relax_gym.errors import ConfigError
from relax_gym.plugins import plugins
from relax_gym.registry import Component, load

if TYPE_CHECKING:
    from relax_gym.config import RunConfig


def launched_rank() -> int | None:
    """This process's rank when torchrun or the like has started several (`WORLD_SIZE`), else None."""
    return int(os.environ.get("RANK", "0")) if int(os.environ.get("WORLD_SIZE", "1")) > 1 else None


def serve_learner(config: RunConfig) -> bool:
    """In a launched process that is not the first, do its part of the learner until the first has ended.

    Returns:
        Whether this is such a process; it has nothing left to do then.

    Raises:
        ConfigError: the config's learner runs in one process, or in another number of them.
    """
    serve = serving(config)
    if serve is None or launched_rank() == 0:
        return False
    load(serve)()
    return True


def serving(config: RunConfig) -> str | Callable[[], None] | None:
    """What launched processes but the first are to run; None where none was launched.

    Raises:
        ConfigError: the config's learner runs in one process.
    """
    if launched_rank() is None:
        return None
    learner = plugins().get("learner", config.learner.name)
    serve = learner.serve if isinstance(learner, Component) else None
    if serve is None:
        raise ConfigError(
            f"{os.environ['WORLD_SIZE']} processes were started (WORLD_SIZE), but learner.name = "
            f'"{config.learner.name}" runs in one; start it without torchrun, or use learner.name = "megatron"'
        )
    return serve
