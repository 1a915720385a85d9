"""How well the box that the model drew covers the right one."""

from __future__ import annotations

from dataclasses import dataclass

from relax_gym.types import Trajectory
from relax_gym_rewards._answers import answer_text, choice_option, number_option, stated_answer
from relax_gym_rewards._boxes import (
    COORDINATES,
    MAX_BOXES,
    boxes_in,
    inside_image,
    overlap,
    reference_boxes,
    scale,
    scaled,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class IoU:
    """Intersection over union, 0 to 1, of a box in the last action with `info[field]`; with `threshold`, 0 or 1.

    A box is `[x1, y1, x2, y2]` or `(x1, y1), (x2, y2)` (`form = "xywh"`: left, top, width, height), alone or in JSON;
    the last one counts. Where the reference is a list of boxes all count: best pairs first, the sum of their IoU over
    the larger number of boxes. `coordinates` are the model's and `reference_coordinates` the reference's: "unit" (0 to
    1), "thousand" (0 to 1000) or "pixels", which needs `info["image_size"]` where the two differ. A box with no area,
    or outside of the image, is wrong.
    """

    field: str = "bbox"
    form: str = "xyxy"
    coordinates: str = "pixels"
    reference_coordinates: str = "pixels"
    threshold: float | None = None

    def __post_init__(self) -> None:
        choice_option("iou", "form", self.form, ("xyxy", "xywh"))
        choice_option("iou", "coordinates", self.coordinates, tuple(COORDINATES))
        choice_option("iou", "reference_coordinates", self.reference_coordinates, tuple(COORDINATES))
        if self.threshold is not None:
            number_option("iou", "threshold", self.threshold, 0, 1, low_allowed=False)

    def __call__(self, trajectory: Trajectory, /) -> float:
        expected = reference_boxes(trajectory, self.field, self.form, "iou")
        given = boxes_in(stated_answer(answer_text(trajectory)), self.form)
        given = given[-1:] if len(expected) == 1 else given
        if not given or len(given) > MAX_BOXES:
            return 0.0
        known = self.coordinates != "pixels" or trajectory.info.get("image_size") is not None
        if known or self.coordinates != self.reference_coordinates:
            size = scale(trajectory, self.coordinates, "iou")
            there = scale(trajectory, self.reference_coordinates, "iou")
            shares = [scaled(box, size) for box in given]
            if not all(map(inside_image, shares)):
                return 0.0
            score = matched(shares, [scaled(box, there) for box in expected])
        else:
            score = matched([list(box) for box in given], [list(box) for box in expected])
        return score if self.threshold is None else float(score >= self.threshold)


def matched(given: list[list[float]], expected: list[list[float]]) -> float:
    """Sum of the IoU of pairs, the best first, over the larger number of boxes."""
    pairs = sorted(
        ((overlap(one, other), i, j) for i, one in enumerate(given) for j, other in enumerate(expected)), reverse=True
    )
    total, taken, found = 0.0, set[int](), set[int]()
    for value, i, j in pairs:
        if i not in taken and j not in found:
            total, taken, found = total + value, taken | {i}, found | {j}
    return total / max(len(given), len(expected))
