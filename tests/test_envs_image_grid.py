"""The grid of pictures: what is seen leads to the goal, and every turn has its own picture."""

from __future__ import annotations

from collections import Counter

import numpy as np
from image_env_kit import make, pictures
from numpy.typing import NDArray

from relax_gym_envs.grid_world import MOVES, shortest_path


def cells(picture: NDArray[np.uint8], cell: int = 8) -> dict[str, tuple[int, int]]:
    """Where the agent and the goal are, as anybody can see."""
    small = picture[::cell, ::cell].astype(int)
    found = {}
    for name, channel in (("agent", 0), ("goal", 1)):
        others = [other for other in range(3) if other != channel]
        row, column = np.argwhere((small[..., channel] > 150) & (small[..., others].max(axis=-1) < 100))[0]
        found[name] = int(row), int(column)
    return found


def test_the_picture_alone_leads_to_the_goal() -> None:
    env = make("ImageGrid", width=5, height=3)
    for seed in range(30):
        observation, _ = env.reset(seed=seed)
        total = 0.0
        while True:
            (picture,) = pictures(observation)
            assert picture.shape == (40, 40, 3)
            assert (picture[24:] == 60).all(), "what is outside is grey"
            seen = cells(picture)
            path = shortest_path(3, 5, frozenset(), seen["agent"], seen["goal"])
            assert path
            observation, reward, done, _, _ = env.step(f"I think left or rather {path[0]}.")
            total += reward
            if done:
                break
        assert total == 1.0


def test_each_turn_has_a_picture_of_its_own() -> None:
    env = make("ImageGrid", width=4, height=1, style="terse")
    (before,) = pictures(env.reset(seed=0)[0])
    kept = before.copy()
    (after,) = pictures(env.step({"left": "right", "right": "left"}[env.expert_action()])[0])
    assert np.array_equal(before, kept)
    assert not np.shares_memory(before, after)


def test_walls_and_edges_stop_a_move_that_counts_all_the_same() -> None:
    env = make("ImageGrid", walls=0.5, max_steps=30)
    bumps = Counter[str]()
    for seed in range(20):
        observation, _ = env.reset(seed=seed)
        (picture,) = pictures(observation)
        for word, (down, right) in MOVES.items():
            seen, small = cells(picture), picture[::8, ::8]
            row, column = seen["agent"][0] + down, seen["agent"][1] + right
            outside = not (0 <= row < 4 and 0 <= column < 4)
            if outside or (small[row, column] == 120).all():
                left = env.left
                observation, reward, done, _, _ = env.step(word)
                (after,) = pictures(observation)
                assert np.array_equal(after, picture)
                assert (reward, done, env.left) == (0.0, False, left - 1)
                assert observation[0]["content"][1]["text"] == "Bump!"
                bumps["edge" if outside else "wall"] += 1
    assert min(bumps["edge"], bumps["wall"]) > 5


def test_moves_run_out() -> None:
    env = make("ImageGrid", width=4, height=1, max_steps=2)
    env.reset(seed=0)
    assert env.step("up")[1:4] == (0.0, False, False)
    assert env.step("up")[1:4] == (0.0, True, False)


def test_a_reply_without_a_direction_ends_the_episode() -> None:
    env = make("ImageGrid", invalid_reward=-0.5)
    env.reset(seed=0)
    assert env.step("I cannot see")[1:3] == (-0.5, True)
    terse = make("ImageGrid", style="terse")
    terse.reset(seed=0)
    assert terse.step("left.")[1:3] == (-0.2, True)


def test_pictures_of_shuffled_media_lead_nowhere() -> None:
    env = make("ImageGrid", shuffle_media=True)
    right = []
    for seed in range(300):
        (picture,) = pictures(env.reset(seed=seed)[0])
        seen = cells(picture)
        guess = shortest_path(4, 4, frozenset(), seen["agent"], seen["goal"])
        right.append(guess is not None and guess[0] == env.expert_action())
    assert np.mean(right) < 0.45
