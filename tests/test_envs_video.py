"""What the video env shows: every answer can be read from the pixels, and from nothing else."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from question_solvers import answer_video, find, parts, shapes, text_of

import relax_gym

KINDS = ("direction", "count", "order")


def make(**kwargs: Any) -> Any:
    return relax_gym.make("relax_gym/VideoQuestion-v0", **kwargs)


def clip(env: Any, seed: int) -> tuple[str, list[Any]]:
    """(question, frames) of the first turn."""
    observation, _ = env.reset(seed=seed)
    return text_of(observation), parts(observation, "video")[0]["video"]


def test_a_clip_is_a_list_of_frames_with_its_rate() -> None:
    observation, _ = make(objects=2, frames=5, size=64, fps=3).reset(seed=0)
    (part,) = parts(observation, "video")
    assert list(part) == ["type", "video", "fps"]
    assert part["fps"] == 3.0
    assert isinstance(part["video"], list)
    assert [(frame.shape, frame.dtype) for frame in part["video"]] == [((64, 64, 3), np.uint8)] * 10


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [{"size": 32, "frames": 4}, {"size": 64, "frames": 7}, {"size": 32, "wrap": False}])
def test_pixels_tell_the_answer(kind: str, shape: dict[str, Any]) -> None:
    env = make(questions=[kind], **shape)
    for seed in range(40):
        question, frames = clip(env, seed)
        assert answer_video(question, frames) == env.expert_action()


@pytest.mark.parametrize(("kind", "chance"), [("direction", 1 / 4), ("count", 1 / 3), ("order", 1 / 4)])
def test_pixels_of_shuffled_media_tell_nothing(kind: str, chance: float) -> None:
    env = make(questions=[kind], size=32, shuffle_media=True)
    right = [answer_video(*clip(env, seed)) == env.expert_action() for seed in range(400)]
    assert np.mean(right) == pytest.approx(chance, abs=0.08)  # three standard errors


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kwargs", [{"objects": 2}, {"objects": 4}, {"same_clip": True}])
def test_answers_are_balanced(kind: str, kwargs: dict[str, Any]) -> None:
    env, answers = make(questions=[kind], size=16, frames=3, **kwargs), Counter[str]()
    for seed in range(400):
        env.reset(seed=seed)
        answers[env.expert_action()] += 1
    options = env.question.options
    assert answers.keys() == set(options)
    for count in answers.values():
        assert count == pytest.approx(400 / len(options), abs=0.18 * 400 / len(options) + 15)


def test_with_wrap_no_single_frame_tells_the_direction() -> None:
    env = make(questions=["direction"], objects=1, size=32, style="terse")
    places: dict[str, list[tuple[int, int]]] = {}
    for seed in range(400):
        _, frames = clip(env, seed)
        rows, columns = np.nonzero(frames[0].max(axis=-1) > 150)
        places.setdefault(env.expert_action(), []).append((rows.max() // 8, columns.max() // 8))
    for direction in ("left", "right", "up", "down"):
        for axis in (0, 1):
            seen = Counter(place[axis] for place in places[direction])
            assert seen.keys() == {0, 1, 2, 3}
            assert max(seen.values()) < 0.45 * len(places[direction])


def test_without_wrap_shapes_cross_from_edge_to_edge() -> None:
    env = make(questions=["direction"], objects=1, size=32, wrap=False)
    for seed in range(20):
        _, frames = clip(env, seed)
        places = [tuple(axis.max() // 8 for axis in np.nonzero(frame.max(axis=-1) > 150)) for frame in frames]
        moving = 0 if env.expert_action() in ("up", "down") else 1
        expected = [0, 1, 2, 3] if env.expert_action() in ("right", "down") else [3, 2, 1, 0]
        assert [place[moving] for place in places] == expected
        assert len({place[1 - moving] for place in places}) == 1


def test_motion_is_by_a_quarter_of_the_picture_with_four_frames() -> None:
    for seed in range(10):
        _, frames = clip(make(questions=["direction"], objects=1, size=32), seed)
        found = [find(frame) for frame in frames]
        for before, after in pairwise(found):
            assert before is not None
            assert after is not None
            steps = [round(float(np.angle(after[axis] / before[axis])) / (np.pi / 2), 3) for axis in (1, 2)]
            assert sorted(map(abs, steps)) == [0.0, 1.0]


def test_the_length_of_a_clip_does_not_tell_the_count() -> None:
    env = make(questions=["count"], size=16)
    clips = [clip(env, seed)[1] for seed in range(20)]
    assert {len(frames) for frames in clips} == {12}
    assert {len(shapes(frames)) for frames in clips} == {1, 2, 3}


def test_the_order_is_asked_of_two_shapes_at_least() -> None:
    env = make(questions=["order"], size=16)
    assert {len(shapes(clip(env, seed)[1])) for seed in range(30)} == {2, 3}


def test_new_clips_in_later_turns() -> None:
    env = make(turns=4, size=32)
    observation, _ = env.reset(seed=1)
    seen = []
    for _ in range(4):
        (part,) = parts(observation, "video")
        seen.append(np.stack(part["video"]).tobytes())
        answer = answer_video(env.question.text, part["video"])
        assert answer == env.expert_action()
        observation = env.step(answer).observation
    assert len(set(seen)) == 4


def test_other_questions_about_the_same_clip() -> None:
    for seed in range(10):
        env = make(turns=6, same_clip=True, size=32)
        observation, _ = env.reset(seed=seed)
        frames, asked = parts(observation, "video")[0]["video"], []
        for _ in range(6):
            asked.append(env.question)
            assert answer_video(env.question.text, frames) == env.expert_action()
            observation = env.step(env.expert_action()).observation
            assert parts(observation, "video") == []
        there_are = 3 + len(shapes(frames))
        assert len(set(asked)) == min(6, there_are)
        assert len(set(asked[:there_are])) == len(asked[:there_are])
