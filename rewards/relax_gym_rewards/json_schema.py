"""1 when the answer is JSON that a schema allows, else 0."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

from relax_gym.errors import RewardError
from relax_gym.types import Trajectory
from relax_gym_rewards._answers import answer_text, library, number_option, stated_answer
from relax_gym_rewards._episode import reference

FENCE = "```"


class JsonSchema:
    """Validates what the model said last with `schema`, or with `info["schema"]` without one (draft 2020-12).

    The JSON is the last `<answer>` tag or the last fenced block, else the whole text without thinking, and at most
    `max_characters` long. NaN, infinity and keys that stand twice are no JSON. Patterns are RE2's, so they take linear
    time, and nothing a schema refers to is fetched.
    """

    def __init__(self, *, schema: Mapping[str, Any] | None = None, max_characters: int = 50_000) -> None:
        number_option("json_schema", "max_characters", max_characters, 1, 1e7, integer=True)
        self.max_characters = max_characters
        self._unresolvable = library("referencing.exceptions", "json_schema").Unresolvable
        self._validator = None if schema is None else validator(schema)

    def __call__(self, trajectory: Trajectory, /) -> float:
        checker = self._validator or validator(reference(trajectory, "schema"))
        text = _json_part(answer_text(trajectory))
        if len(text) > self.max_characters:
            return 0.0
        try:
            value = json.loads(text, parse_float=_finite, parse_constant=_refuse, object_pairs_hook=_unique)
            return float(checker.is_valid(value))
        except self._unresolvable as error:
            raise RewardError(
                f"json_schema: the schema refers to {error.ref!r}, which is not in it; put it under $defs"
            ) from error
        except (ValueError, ArithmeticError, RecursionError):  # no JSON, numbers too large, or nested too deep
            return 0.0


def validator(schema: Any) -> Any:
    """A validator for a JSON schema. Raises RewardError saying what is wrong with it."""
    jsonschema, referencing = library("jsonschema", "json_schema"), library("referencing", "json_schema")
    re2 = library("re2", "json_schema")
    options = re2.Options()
    options.log_errors = False

    def pattern(_: Any, pattern: str, instance: Any, __: Any) -> Iterator[Any]:
        if isinstance(instance, str) and not re2.compile(pattern, options).search(_clean(instance)):
            yield jsonschema.ValidationError(f"does not match {pattern!r}")

    def pattern_properties(owner: Any, patterns: Mapping[str, Any], instance: Any, _: Any) -> Iterator[Any]:
        for pattern, subschema in patterns.items() if isinstance(instance, Mapping) else ():
            compiled = re2.compile(pattern, options)
            for key in filter(lambda key: compiled.search(_clean(key)), instance):
                yield from owner.descend(instance[key], subschema, path=key, schema_path=pattern)

    def unique_items(_: Any, wanted: bool, instance: Any, __: Any) -> Iterator[Any]:
        if wanted and isinstance(instance, list) and len(set(map(_canonical, instance))) != len(instance):
            yield jsonschema.ValidationError("items are not unique")

    def multiple_of(owner: Any, step: Any, instance: Any, _: Any) -> Iterator[Any]:
        if owner.is_type(instance, "number") and Fraction(str(instance)) % Fraction(str(step)):
            yield jsonschema.ValidationError(f"{instance!r} is not a multiple of {step}")

    keywords = {"pattern": pattern, "patternProperties": pattern_properties, "uniqueItems": unique_items}
    keywords["multipleOf"] = multiple_of
    bounded = jsonschema.validators.extend(jsonschema.Draft202012Validator, keywords)
    try:
        bounded.check_schema(schema)
        _check_patterns(schema, re2, options)
    except (jsonschema.SchemaError, re2.error) as error:
        reason = error.message if isinstance(error, jsonschema.SchemaError) else error.args[0].decode(errors="replace")
        raise RewardError(f"json_schema: the schema {schema!r:.100} is not valid: {reason}") from error
    return bounded(schema, registry=referencing.Registry())


def _check_patterns(schema: Any, re2: Any, options: Any) -> None:
    if isinstance(schema, Mapping):
        for key, value in schema.items():
            if key == "pattern" and isinstance(value, str):
                re2.compile(value, options)
            for pattern in value if key == "patternProperties" and isinstance(value, Mapping) else ():
                re2.compile(pattern, options)
    for value in schema.values() if isinstance(schema, Mapping) else schema if isinstance(schema, list) else ():
        _check_patterns(value, re2, options)


def _json_part(text: str) -> str:
    inside = stated_answer(text)
    before, closed, _ = inside.rpartition(FENCE)
    start = before.rfind(FENCE)
    if not closed or start < 0:
        return inside
    language, newline, block = before[start + len(FENCE) :].partition("\n")
    return block if newline and language.strip() in ("", "json") else inside


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else _refuse(digits)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    return found


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode()  # JSON may hold half a surrogate pair, RE2 may not


def _canonical(value: Any) -> str:
    """The same text for equal JSON values; 1 and 1.0 are equal, 1 and true are not."""
    return json.dumps(_whole(value), sort_keys=True)


def _whole(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    return [_whole(item) for item in value] if isinstance(value, list) else value
