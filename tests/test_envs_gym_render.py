"""Envs of gymnasium are played by the pictures they draw."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import gymnasium
import numpy as np
import pytest
from image_env_kit import Counter3, make, pictures

from relax_gym.errors import ConfigError
from relax_gym.testing import assert_env


class Blind(Counter3):
    """Draws nothing."""

    metadata = {"render_modes": []}  # noqa: RUF012


gymnasium.register("Blind-v0", Blind)


def test_a_gymnasium_env_is_played_by_its_pictures() -> None:
    env = make("GymRender", env_id="Counter3-v0", frame_size=20)
    observation, _ = env.reset(seed=2)
    assert observation[0]["content"][1]["text"].endswith("Reply with one of: 1, 2, 3.")
    (picture,) = pictures(observation)
    assert (picture.shape, picture.max()) == ((10, 20, 3), 0)
    observation, reward, done, truncated, _ = env.step("two")
    assert (pictures(observation)[0].min(), reward, done, truncated) == (20, 2.0, False, False)
    assert env.step("jump")[0] == [{"role": "user", "content": "Reply with one of: 1, 2, 3."}]
    env.step("3")
    assert env.step("1")[1:4] == (1.0, True, False)


def test_repeated_actions_are_seen_as_a_video() -> None:
    env = make("GymRender", env_id="Counter3-v0", frames=4, actions=["low", "mid", "high"], env_kwargs={"goal": 5})
    env.reset(seed=0)
    observation, reward, done, _, _ = env.step("mid")
    (part,) = observation[0]["content"]
    assert [int(frame.max()) for frame in part["video"]] == [20, 40, 60]
    assert (part["fps"], reward, done) == (5.0, 6.0, True)


@pytest.mark.parametrize(
    ("kwargs", "why"),
    [
        ({"env_id": "Nowhere-v0"}, "doesn't exist. An env of another package is named module:id"),
        ({"env_id": "no_such_module:Nowhere-v0"}, "cannot be made with render_mode='rgb_array'"),
        ({"env_id": "Counter3-v0", "env_kwargs": {"size": 3}}, "cannot be made with render_mode='rgb_array'"),
        ({"env_id": "Counter3-v0", "env_kwargs": {"boxed": True}}, "only Discrete actions can be named"),
        ({"env_id": "Counter3-v0", "actions": ["a", "b"]}, "needs 3 different names"),
        ({"env_id": "Counter3-v0", "actions": ["up", "Up", "down"]}, "needs 3 different names"),
        ({"env_id": "Counter3-v0", "frame_size": 0}, "frame_size is 0; it must be a whole number from 8"),
        ({"env_id": "Counter3-v0", "frames": 2, "fps": 0}, "fps is 0; it must be a number from 0.1"),
    ],
)
def test_what_cannot_be_bridged_is_refused(kwargs: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        make("GymRender", **kwargs)


@pytest.mark.filterwarnings("ignore:.*not in the possible render_modes")
def test_an_env_without_pictures_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"draws no pictures: its render modes are \[\], without 'rgb_array'"):
        make("GymRender", env_id="Blind-v0")


@pytest.mark.parametrize("env_id", ["FrozenLake-v1", "CartPole-v1"])
def test_without_pygame_the_error_says_what_to_install(env_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pygame", None)  # importing it fails, as where it is not installed
    with pytest.raises(ConfigError, match=r"pygame is not installed.*pip install relax-gym\[envs\]"):
        make("GymRender", env_id=env_id).reset(seed=0)


def test_episodes_end_where_the_env_cuts_them_off() -> None:
    env = make("GymRender", env_id="Counter3-v0", env_kwargs={"max_episode_steps": 3, "goal": 99}, frames=2)
    env.reset(seed=0)
    assert env.step("1")[1:4] == (2.0, False, False)
    observation, *rest = env.step("1")
    assert (rest[:3], len(observation[0]["content"][0]["video"])) == ([1.0, False, True], 1)


@pytest.mark.parametrize("kwargs", [{"env_id": "FrozenLake-v1"}, {"env_id": "CartPole-v1", "frames": 3}], ids=str)
def test_envs_that_hold_a_screen_keep_the_contract(kwargs: dict[str, Any]) -> None:
    pytest.importorskip("pygame")
    assert_env(lambda: make("GymRender", frame_size=64, **kwargs))


def test_a_state_goes_on_in_another_instance_whatever_the_seed() -> None:
    pytest.importorskip("pygame")
    for seed in (3, None):
        one, two = (make("GymRender", env_id="FrozenLake-v1", frame_size=64) for _ in range(2))
        one.reset(seed=seed)
        one.step("right")
        state = pickle.loads(pickle.dumps(one.get_state()))
        two.set_state(state)
        assert state["moves"] == two.moves == [2]
        for word in ("right", "down", "left"):
            ours, theirs = one.step(word), two.step(word)
            assert np.array_equal(pictures(ours[0])[0], pictures(theirs[0])[0])
            assert ours[1:4] == theirs[1:4]
            if ours[2]:
                break


def test_minigrid_is_played_by_the_names_of_its_actions() -> None:
    pytest.importorskip("minigrid")
    env = make("GymRender", env_id="minigrid:MiniGrid-Empty-5x5-v0", frame_size=80)
    (picture,) = pictures(env.reset(seed=0)[0])
    assert picture.shape == (80, 80, 3)
    results = [env.step(f"I go {word}") for word in ("forward", "forward", "right", "forward", "forward")]
    assert [result[2] for result in results] == [False, False, False, False, True]
    assert results[-1][1] > 0.9


def test_well_known_envs_have_names_for_their_actions() -> None:
    pytest.importorskip("pygame")
    lake = make("GymRender", env_id="FrozenLake-v1", env_kwargs={"is_slippery": False})
    first, _ = lake.reset(seed=1)
    assert lake.actions == ("left", "down", "right", "up")
    moved, *_ = lake.step("right")
    assert not np.array_equal(pictures(first)[0], pictures(moved)[0])
    total = sum(lake.step(word)[1] for word in ("right", "down", "down", "down", "right"))
    assert total == 1.0
    pole = make("GymRender", env_id="CartPole-v1", frames=3, frame_size=100)
    observation, _ = pole.reset(seed=1)
    assert observation[0]["content"][0]["video"][0].shape == (67, 100, 3)
    assert pole.step("left")[1] == 3.0
    lake.close(), pole.close()
