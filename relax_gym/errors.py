"""Every error relax-gym raises on purpose. Each message says what was given, what is allowed, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

UNKNOWN_ENV = ". Commands find the envs of installed plugins only: `relax-gym init plugin NAME` makes one for yours"


class RelaxGymError(Exception):
    """Base of all errors a user can act on; the CLI prints it as one message without a traceback."""


class ConfigError(RelaxGymError):
    """A configuration file, key or value is wrong."""


class UnknownNameError(RelaxGymError):
    """A name that nobody registered; the message suggests the nearest registered one."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        self.kind, self.name, self.known = kind, name, sorted(known)
        hint = UNKNOWN_ENV if kind == "env" else ""
        super().__init__(f"unknown {kind} {name!r}{suggestion(name, self.known)}{hint}")


class PluginError(RelaxGymError):
    """A plugin is broken, misspells a hook or claims a name that is taken."""


class EnvError(RelaxGymError):
    """An environment broke its contract."""


class TemplateError(RelaxGymError):
    """A chat template cannot express the conversation an environment needs."""


class ModelError(RelaxGymError):
    """A model or tokenizer cannot be found, fetched or used."""


class MediaError(RelaxGymError):
    """An image, video or audio item cannot be read; names its source."""


class SamplerError(RelaxGymError):
    """A sampler cannot serve requests or returned an inconsistent completion."""


class RewardError(RelaxGymError):
    """A reward is configured wrongly. A reward that fails on one episode is data, not this error."""


class StalenessError(RelaxGymError):
    """A token older than `max_staleness` reached the learner: a bug in the core, never data."""


class RunFolderError(RelaxGymError):
    """A run folder cannot be written, or belongs to another run."""


class TrainingError(RelaxGymError):
    """Training cannot go on: no trainable tokens step after step, or a non-finite loss."""


class StuckError(TrainingError):
    """Something took longer than `[supervision]` allows; names it."""


class Stopped(RelaxGymError):
    """A signal ended the run, and everything is saved that had been finished. `signal` is its number."""

    def __init__(self, signal: int, message: str) -> None:
        self.signal = signal
        super().__init__(message)


def reason(error: BaseException) -> str:
    """The message of an error, with its type unless it is one that was written for the user."""
    return str(error) if isinstance(error, RelaxGymError) else f"{type(error).__name__}: {error}"


def first_cause(error: BaseException) -> BaseException:
    """What to show of an error: of a group, the first in it that a user can act on, else the first."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    causes = [first_cause(part) for part in error.exceptions]
    return next((cause for cause in causes if isinstance(cause, RelaxGymError)), causes[0])


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The most similar known name, or None when nothing is close."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return matches[0] if matches else None


def suggestion(name: str, known: Iterable[str]) -> str:
    """`"; did you mean 'x'? Known: a, b"`, ready to append to a message."""
    known = list(known)
    match = nearest(name, known)
    hint = f"; did you mean {match!r}?" if match else "."
    return f"{hint} Known: {', '.join(known) if known else 'none'}"
