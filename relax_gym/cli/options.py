"""The options of a plugin as rows of a table."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

from relax_gym.cli.output import as_toml
from relax_gym.section import Section

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo


def option_rows(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """(name, type, default, what it is) of each option, those of sections in it under `section.option`."""
    for name, field in model.model_fields.items():
        yield prefix + name, _type(field.annotation), _default(field), _description(model, name)
        for section in filter(_is_section, _members(field.annotation)):
            yield from option_rows(section, f"{prefix}{name}.")


def _members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _is_section(annotation: Any) -> bool:
    """Whether it is one whose keys are known; that of a plugin has others, too."""
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _type(annotation: Any) -> str:
    texts = []
    for member in _members(annotation):
        if hasattr(member, "model_fields"):
            texts.append("section")
        elif get_origin(member) is Literal:
            texts.extend(map(as_toml, get_args(member)))
        else:
            texts.append("None" if member is type(None) else inspect.formatannotation(member).replace("typing.", ""))
    return " | ".join(texts)


def _description(model: type[BaseModel], name: str) -> str:
    """Of the field, or of the one whose default it replaces."""
    fields = (getattr(base, "model_fields", {}).get(name) for base in model.__mro__)
    return next((field.description for field in fields if field and field.description), "")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return as_toml(field.get_default(call_default_factory=True))
