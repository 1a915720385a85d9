"""Rewards of grounding: boxes and points, in the coordinates that were declared."""

from __future__ import annotations

from typing import Any

import pytest
from reward_kit import episode

from relax_gym.errors import RewardError
from relax_gym.testing import check_reward
from relax_gym_rewards.iou import IoU
from relax_gym_rewards.point import Point

HUGE = 100_000
BOX = [10, 20, 30, 40]
OF_THOUSAND = {"reference_coordinates": "thousand"}
THOUSAND = {"coordinates": "thousand", "size": [200, 100]}


@pytest.mark.parametrize(
    ("action", "bbox", "options", "expected"),
    [
        ("[10, 20, 30, 40]", BOX, {}, 1.0),
        ("(10,20,30,40)", BOX, {}, 1.0),
        ("(10, 20), (30, 40)", BOX, {}, 1.0),
        ("[[10, 20], [30, 40]]", BOX, {}, 1.0),
        ("<box>[10.0, 20.0, 30.0, 40.0]</box>", BOX, {}, 1.0),
        ('{"bbox_2d": [10, 20, 30, 40], "label": "cat"}', BOX, {}, 1.0),
        ('```json\n[{"bbox_2d": [\n10,\n20,\n30,\n40\n]}]\n```', BOX, {}, 1.0),
        ("[10, 20, 30, 30]", BOX, {}, 0.5),
        ("[20, 30, 40, 50]", BOX, {}, 1 / 7),
        ("[10, 20, 20, 30]", BOX, {}, 0.25),
        ("[10, 20, 30, 60]", BOX, {}, 0.5),
        ("[40, 50, 60, 70]", BOX, {}, 0.0),
        ("[30, 40, 50, 60]", BOX, {}, 0.0),
        ("[30, 40, 10, 20]", BOX, {}, 0.0),
        ("[10, 20, 10, 20]", BOX, {}, 0.0),
        ("[0, 0, 999999999, 999999999]", BOX, {}, 400 / 999999999**2),
        ("[0, 0, 5, 5], no: [10, 20, 30, 40]", BOX, {}, 1.0),
        ("[10, 20, 30, 40], no: [0, 0, 5, 5]", BOX, {}, 0.0),
        ("<think>[10, 20, 30, 40]</think>", BOX, {}, 0.0),
        ("<think>[10, 20, 30, 40]", BOX, {}, 0.0),
        ("[1, 2, 3, 4] <answer>[10, 20, 30, 40]</answer> [1, 2, 3, 4]", BOX, {}, 1.0),
        ("10, 20, 30, 40", BOX, {}, 0.0),
        ("[10, 20, 30]", BOX, {}, 0.0),
        ("[10, 20, 30, 40, 50]", BOX, {}, 0.0),
        ("[nan, nan, nan, nan]", BOX, {}, 0.0),
        ("[1e1, 2e1, 3e1, 4e1]", BOX, {}, 0.0),
        ("[１０, ２０, ３０, ４０]", BOX, {}, 0.0),
        ("", BOX, {}, 0.0),
        ("[" * HUGE, BOX, {}, 0.0),
        ("[1," * HUGE, BOX, {}, 0.0),
        ("[10, 20, 20, 20]", BOX, {"form": "xywh"}, 1 / 3),
        ("[10, 20, 20, 20]", [10, 20, 20, 20], {"form": "xywh"}, 1.0),
        ("[50, 200, 150, 400]", BOX, THOUSAND, 1.0),
        ("[10, 20, 30, 40]", BOX, THOUSAND, 0.0),
        ("[0.05, 0.2, 0.15, 0.4]", BOX, {"coordinates": "unit", "size": [200, 100]}, 1.0),
        ("[10, 20, 30, 40]", BOX, {"coordinates": "unit", "size": [200, 100]}, 0.0),
        ("[0.1, 0.2, 0.3, 0.4]", [100, 200, 300, 400], {"coordinates": "unit", **OF_THOUSAND}, 1.0),
        ("[10, 20, 30, 400]", BOX, {"size": [200, 100]}, 0.0),
        ("[10, 20, 30, 30]", BOX, {"threshold": 0.5}, 1.0),
        ("[10, 20, 20, 30]", BOX, {"threshold": 0.5}, 0.0),
        ("[0, 0, 2, 2] [4, 4, 6, 6]", [[4, 4, 6, 6], [0, 0, 2, 2]], {}, 1.0),
        ("[0, 0, 2, 2]", [[4, 4, 6, 6], [0, 0, 2, 2]], {}, 0.5),
        ("[0, 0, 2, 2] [4, 4, 6, 6] [8, 8, 9, 9]", [[4, 4, 6, 6], [0, 0, 2, 2]], {}, 2 / 3),
        ("[0, 0, 2, 2] " * 2, [[4, 4, 6, 6], [0, 0, 2, 2]], {}, 0.5),
        ("[0, 0, 2, 2] " * 5000, [[4, 4, 6, 6], [0, 0, 2, 2]], {}, 0.0),
    ],
)
def test_iou(action: str, bbox: Any, options: dict[str, Any], expected: float) -> None:
    options = dict(options)
    size = {"image_size": options.pop("size")} if "size" in options else {}
    finished = episode("something else", action, bbox=bbox, **size)
    assert IoU(**options)(finished) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("action", "bbox", "options", "expected"),
    [
        ("(15, 25)", BOX, {}, 1.0),
        ("[15, 25]", BOX, {}, 1.0),
        ("(10, 20)", BOX, {}, 1.0),
        ("(9.9, 20)", BOX, {}, 0.0),
        ("(30.0, 40.0)", BOX, {}, 1.0),
        ("(25, 15)", BOX, {}, 0.0),
        ("(-15, 25)", BOX, {}, 0.0),
        ("click(x=15, y=25)", BOX, {}, 1.0),
        ('<point x="15.5" y="25.5" alt="cat">cat</point>', BOX, {}, 1.0),
        ('{"x": 15, "y": 25}', BOX, {}, 1.0),
        ('{"point_2d": [15, 25], "label": "cat"}', BOX, {}, 1.0),
        ("(1, 1), no: (15, 25)", BOX, {}, 1.0),
        ("(15, 25), no: (1, 1)", BOX, {}, 0.0),
        ("[10, 20, 30, 40]", BOX, {}, 0.0),
        ("(10, 20), (30, 40)", BOX, {}, 0.0),
        ("<think>(15, 25)</think>", BOX, {}, 0.0),
        ("<think>(15, 25)", BOX, {}, 0.0),
        ("<answer>(15, 25)</answer> (1, 1)", BOX, {}, 1.0),
        ("15, 25", BOX, {}, 0.0),
        ("(１５, ２５)", BOX, {}, 0.0),
        ("", BOX, {}, 0.0),
        ("(1," * HUGE, BOX, {}, 0.0),
        ("(75, 250)", BOX, THOUSAND, 1.0),
        ("(15, 25)", BOX, THOUSAND, 0.0),
        ("(0.1, 0.3)", BOX, {"coordinates": "unit", "size": [200, 100]}, 1.0),
        ("(15, 25)", [[0, 0, 1, 1], BOX], {}, 1.0),
        ("(5, 5)", [[0, 0, 1, 1], BOX], {}, 0.0),
        ("(3, 4)", [0, 0], {"radius": 5}, 1.0),
        ("(3, 4.1)", [0, 0], {"radius": 5}, 0.0),
        ("(150, 400)", [30, 40], {"radius": 1, **THOUSAND}, 1.0),
        ("(160, 400)", [30, 40], {"radius": 1, **THOUSAND}, 0.0),
    ],
)
def test_point(action: str, bbox: Any, options: dict[str, Any], expected: float) -> None:
    options = dict(options)
    size = {"image_size": options.pop("size")} if "size" in options else {}
    assert Point(**options)(episode("something else", action, bbox=bbox, **size)) == expected


@pytest.mark.parametrize("reward", [IoU(), Point()], ids=["iou", "point"])
@pytest.mark.parametrize("bbox", ["[1, 2, 3, 4]", [1, 2, 3], [], [3, 4, 1, 2], [1, 2, 3, "4"], [[1, 2]]], ids=repr)
def test_a_reference_that_is_no_box_leaves_the_episode_unscored(reward: Any, bbox: Any) -> None:
    with pytest.raises(RewardError, match=r"info\['bbox'\] is .*; it must be a box with an area, four numbers as xyxy"):
        reward(episode("[1, 2, 3, 4] (1, 2)", bbox=bbox))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: IoU(form="cxcywh"), "iou: form is 'cxcywh'; it must be one of 'xyxy', 'xywh'"),
        (lambda: IoU(coordinates="percent"), "coordinates is 'percent'; it must be one of 'unit', 'thousand'"),
        (lambda: IoU(threshold=0), "threshold is 0; it must be a number above 0 to 1"),
        (lambda: Point(radius=-1), "point: radius is -1"),
        (lambda: Point()(episode("(1, 2)", bbox=[1, 2])), r"is a point, \[1.0, 2.0\]; set radius ="),
        (lambda: IoU(coordinates="unit")(episode("[0, 0, 1, 1]", bbox=BOX)), "left no 'image_size' in info"),
        (
            lambda: Point(coordinates="unit")(episode("(0, 1)", bbox=BOX, image_size=[0, 9])),
            r"info\['image_size'\] is \[0, 9\]; it must be \[width, height\] in pixels",
        ),
    ],
)
def test_what_is_missing_is_said(make: Any, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        make()


@pytest.mark.parametrize("reward", [IoU(), Point()], ids=["iou", "point"])
def test_they_keep_the_contract_of_rewards(reward: Any) -> None:
    results = check_reward(reward, [episode("[1, 2, 3, 4]", bbox=BOX), episode("(12, 22)", bbox=[BOX, BOX])])
    assert [result.name for result in results if not result.passed] == []
