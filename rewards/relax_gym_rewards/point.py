"""1 when the point that the model named is the right one, else 0."""

from __future__ import annotations

import math
from dataclasses import dataclass

from relax_gym.errors import RewardError
from relax_gym.types import Trajectory
from relax_gym_rewards._answers import answer_text, choice_option, number_option, stated_answer
from relax_gym_rewards._boxes import COORDINATES, numbers, points_in, reference_boxes, scale, scaled
from relax_gym_rewards._episode import reference


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Whether the last point in the last action lies in `info[field]`, a box, or within `radius` of it, a point.

    A point is `(x, y)`, `[x, y]`, `x=… y=…` or JSON with x and y; a box is none. The reference is `[x1, y1, x2, y2]`, a
    list of such boxes, or `[x, y]`. `coordinates` and `reference_coordinates` are "unit" (0 to 1), "thousand" (0 to
    1000) or "pixels"; where they differ pixels need `info["image_size"]`. `radius` is in the reference's coordinates.
    """

    field: str = "bbox"
    coordinates: str = "pixels"
    reference_coordinates: str = "pixels"
    radius: float = 0.0

    def __post_init__(self) -> None:
        choice_option("point", "coordinates", self.coordinates, tuple(COORDINATES))
        choice_option("point", "reference_coordinates", self.reference_coordinates, tuple(COORDINATES))
        number_option("point", "radius", self.radius, 0, 1e6)

    def __call__(self, trajectory: Trajectory, /) -> float:
        target = numbers(reference(trajectory, self.field), 2)
        boxes = [] if target else reference_boxes(trajectory, self.field, "xyxy", "point")
        if target and not self.radius:
            raise RewardError(f"point: info[{self.field!r}] is a point, {target}; set radius = … (how near is right)")
        given = points_in(stated_answer(answer_text(trajectory)))
        if not given:
            return 0.0
        x, y = given[-1]
        if self.coordinates != self.reference_coordinates:
            width, height = scale(trajectory, self.reference_coordinates, "point")
            shares = scaled((x, y), scale(trajectory, self.coordinates, "point"))
            x, y = shares[0] * width, shares[1] * height
        if target:
            return float(math.dist((x, y), target) <= self.radius)
        return float(any(left <= x <= right and top <= y <= bottom for left, top, right, bottom in boxes))
