"""What every section of a config is."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class Section(BaseModel):
    """A part of the config whose keys are all known here. `true` is no number in it, though it is one in Python."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_for_a_number(cls, given: Any, info: ValidationInfo) -> Any:
        annotation = cls.model_fields[info.field_name or ""].annotation
        taken = get_args(annotation) or (annotation,)
        if isinstance(given, bool) and bool not in taken and {int, float}.intersection(taken):
            raise ValueError("a boolean is no number; give a number")
        return given
