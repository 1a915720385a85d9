"""Boxes and points that a model wrote as text or JSON, in declared coordinates."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from relax_gym.errors import RewardError
from relax_gym.types import Trajectory
from relax_gym_rewards._episode import reference

Box = tuple[float, float, float, float]
Point = tuple[float, float]

COORDINATES = {"unit": 1.0, "thousand": 1000.0, "pixels": None}
_N = r"\s{0,9}([-+]?[0-9]{1,9}(?:\.[0-9]{0,9})?)\s{0,9}"
FOUR = re.compile(rf"[\[(]{{1,3}}{_N},{_N}[)\]]?\s?,?\s?[(\[]?{_N},{_N}[)\]]")
_PAIR = rf"[\[(]{_N},{_N}[)\]]"
_KEYED = rf"\bx[\"']?\s?[=:]\s?[\"']?{_N}[\"']?,?\s{{0,9}}[\"']?y[\"']?\s?[=:]\s?[\"']?{_N}"
TWO = re.compile(rf"{_PAIR}|{_KEYED}", re.ASCII)
MAX_BOXES = 100


def boxes_in(text: str, form: str) -> list[Box]:
    """Every `[a, b, c, d]` or `(a, b), (c, d)` of a text, as (left, top, right, bottom). `form` is "xyxy" or "xywh"."""
    return [_corners([float(number) for number in found.groups()], form) for found in FOUR.finditer(text)]


def points_in(text: str) -> list[Point]:
    """Every `(x, y)`, `[x, y]`, `x="…" y="…"` or `"x": …, "y": …` of a text that is no part of a box."""
    pairs = [tuple(map(float, filter(None, found.groups()))) for found in TWO.finditer(FOUR.sub(" ", text))]
    return [(x, y) for x, y in pairs]


def numbers(value: Any, count: int) -> list[float] | None:
    """`value` as `count` numbers; None when it is anything else."""
    if not isinstance(value, (list, tuple)) or len(value) != count:
        return None
    good = all(isinstance(item, (int, float)) and not isinstance(item, bool) for item in value)
    return [float(item) for item in value] if good else None


def reference_boxes(trajectory: Trajectory, field: str, form: str, reward: str) -> list[Box]:
    """The box, or the boxes, of `info[field]`. Raises RewardError when there is none with an area."""
    value = reference(trajectory, field)
    many = value if isinstance(value, (list, tuple)) and value and numbers(value, 4) is None else [value]
    found = [numbers(item, 4) for item in many]
    boxes = [_corners(item, form) for item in found if item is not None]
    if len(boxes) != len(many) or not all(area(box) > 0 for box in boxes):
        raise RewardError(
            f"{reward}: info[{field!r}] is {value!r:.100}; it must be a box with an area, four numbers as {form}, or a "
            "list of such boxes"
        )
    return boxes


def scale(trajectory: Trajectory, coordinates: str, reward: str) -> Point:
    """Width and height of the whole image in `coordinates`, for pixels those of `info["image_size"]`."""
    limit = COORDINATES[coordinates]
    if limit is not None:
        return limit, limit
    value = reference(trajectory, "image_size")
    size = numbers(value, 2)
    if size is None or min(size) <= 0:
        raise RewardError(f"{reward}: info['image_size'] is {value!r:.100}; it must be [width, height] in pixels")
    return size[0], size[1]


def scaled(values: Sequence[float], size: Point) -> list[float]:
    """x, y, x, y … as shares of the image of `size`."""
    return [value / size[index % 2] for index, value in enumerate(values)]


def inside_image(shares: Sequence[float]) -> bool:
    """Whether all coordinates are in the image; rounding may take them out by a thousandth."""
    return all(-0.001 <= share <= 1.001 for share in shares)


def area(box: Sequence[float]) -> float:
    """Of (left, top, right, bottom); 0 for one that is inside out."""
    return max(0.0, box[2] - box[0]) * max(0.0, box[3] - box[1])


def overlap(one: Sequence[float], other: Sequence[float]) -> float:
    """Intersection over union of two boxes (left, top, right, bottom); 0 when either has no area."""
    corners = [*map(max, one[:2], other[:2]), *map(min, one[2:], other[2:])]
    common = area(corners)
    return common / (area(one) + area(other) - common) if area(one) and area(other) else 0.0


def _corners(values: Sequence[float], form: str) -> Box:
    a, b, c, d = values
    return (a, b, c, d) if form == "xyxy" else (a, b, a + c, b + d)
