import dataclasses

import numpy as np
import pytest

from relax_gym.media import Image
from relax_gym.trajectory import to_samples, with_advantage
from relax_gym.types import Completion, FinishReason, Placed, StopReason, Task, Trajectory, Turn


def turn(context: list[int], said: list[int], *, version: int = 0, new: bool = False, reward: float = 0.0) -> Turn:
    return Turn(
        observation=({"role": "user", "content": "?"},),
        context_ids=tuple(context),
        completion=Completion(
            token_ids=tuple(said),
            logprobs=tuple(-0.5 * (i + 1) for i in range(len(said))),
            versions=(version,) * len(said),
            finish_reason=FinishReason.STOP,
        ),
        text="!",
        action="!",
        reward=reward,
        new_segment=new,
    )


def episode(*turns: Turn) -> Trajectory:
    return Trajectory(
        task=Task(env_id="test/X-v0", seed=1),
        episode_id="e",
        turns=turns,
        stop_reason=StopReason.ENV_DONE,
        rewards={"env": 1.0},
    )


def test_k14_only_sampled_ids_have_mask_1() -> None:
    (sample,) = to_samples(episode(turn([1, 2, 3], [4, 5]), turn([6, 7], [8], version=1, reward=1.0)), "g")
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert sample.loss_mask.tolist() == [0, 0, 0, 1, 1, 0, 0, 1]
    assert sample.logprobs.tolist() == [0, 0, 0, -0.5, -1.0, 0, 0, -0.5]
    assert sample.versions.tolist() == [-1, -1, -1, 0, 0, -1, -1, 1]
    assert sample.turn_spans == ((3, 5), (7, 8))
    assert sample.turn_rewards == (0.0, 1.0)
    assert sample.trained_tokens == 3


def test_k04_a_new_segment_starts_a_new_sample_and_k22_trains_each_token_once() -> None:
    parts = to_samples(episode(turn([1, 2], [3]), turn([9, 8, 7], [4, 5], new=True), turn([6], [2])), "g")
    assert [part.token_ids.tolist() for part in parts] == [[1, 2, 3], [9, 8, 7, 4, 5, 6, 2]]
    assert [part.loss_mask.tolist() for part in parts] == [[0, 0, 1], [0, 0, 0, 1, 1, 0, 1]]
    assert sum(part.trained_tokens for part in parts) == 4
    assert [part.segment for part in parts] == [0, 1]


def test_k17_lengths_stay_equal_for_empty_and_cut_completions() -> None:
    (sample,) = to_samples(episode(turn([1], []), turn([2], [3])), "g")
    assert sample.loss_mask.tolist() == [0, 0, 1]
    assert sample.turn_spans == ((1, 1), (2, 3))
    with pytest.raises(ValueError, match="2 token ids, 1 log-probs, 2 versions"):
        Completion(token_ids=(1, 2), logprobs=(0.0,), versions=(0, 0), finish_reason=FinishReason.STOP)


def test_k21_the_advantage_is_broadcast_through_each_samples_own_mask() -> None:
    parts = to_samples(episode(turn([1, 2], [3]), turn([9], [4, 5], new=True)), "g")
    assert [with_advantage(part, 2.0).advantages.tolist() for part in parts] == [[0, 0, 2], [0, 2, 2]]


def test_k30_nan_logprobs_are_refused() -> None:
    with pytest.raises(ValueError, match="NaN log-probs"):
        Completion(token_ids=(1,), logprobs=(float("nan"),), versions=(0,), finish_reason=FinishReason.STOP)


def test_an_episode_without_turns_gives_no_sample() -> None:
    assert to_samples(episode(), "g") == []


def test_k57_media_of_all_turns_are_placed_in_the_sample_of_their_segment() -> None:
    first, second, third = (Image(pixels=np.full((1, 1, 3), shade, dtype=np.uint8)) for shade in range(3))

    def showing(plain: Turn, image: Image, start: int, end: int) -> Turn:
        return dataclasses.replace(plain, media=(Placed(media=image, start=start, end=end),))

    turns = [
        showing(turn([1, 2, 3], [4]), first, 1, 3),
        turn([5], [6]),
        showing(turn([7, 8], [9]), second, 0, 2),
        showing(turn([1, 2], [3], new=True), third, 0, 1),
    ]
    one, two = to_samples(episode(*turns), "g")
    assert [(placed.media, placed.start, placed.end) for placed in one.media] == [(first, 1, 3), (second, 6, 8)]
    assert [(placed.media, placed.start, placed.end) for placed in two.media] == [(third, 0, 1)]
