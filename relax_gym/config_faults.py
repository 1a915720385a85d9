"""What is wrong with a config, said so that it can be put right."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from relax_gym.errors import nearest, suggestion


def explain_fault(model: type[BaseModel], fault: Any, prefix: str) -> str:
    """One of the faults that pydantic found: key under `prefix`, value, what is allowed, the nearest that is."""
    location = [str(part) for part in fault["loc"]]
    key = ".".join(filter(None, [prefix, *location])) or "config"
    if fault["type"] == "extra_forbidden":
        known = _keys_at(model, fault["loc"][:-1])
        return f"unknown key {key!r} (value {fault['input']!r}){suggestion(location[-1], known)}"
    if fault["type"] == "missing":
        return f"key {key!r} is missing; it is required"
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "literal_error" and isinstance(fault["input"], str):
        match = nearest(fault["input"], re.findall(r"'([^']*)'", fault["ctx"]["expected"]))
        message += f"; did you mean {match!r}?" if match else ""
    value = "" if isinstance(fault["input"], Mapping) else f" = {fault['input']!r}"
    return f"{key}{value}: {message}"


def _keys_at(model: type[BaseModel], location: Sequence[str | int]) -> list[str]:
    for part in location:
        if isinstance(part, int):
            continue
        annotation: Any = model.model_fields[part].annotation
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        model = next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))
    return list(model.model_fields)
