"""What holds for every env of pictures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env as gymnasium_check
from image_env_kit import pictures, play

import relax_gym
from relax_gym.testing import assert_env

CASES: dict[str, dict[str, Any]] = {
    "relax_gym/ImageGrid-v0": {"walls": 0.3},
    "relax_gym/ChartQuestion-v0": {"size": 200},
    "relax_gym/ZoomAndLook-v0": {"size": 1024, "view": 128},
}
SOLVED = dict(zip(CASES, (1.0, 1.0, 1.5), strict=True))
CASES["relax_gym/GymRender-v0"] = {"env_id": "Counter3-v0"}


@pytest.mark.parametrize("id", CASES)
def test_the_contract_holds(id: str) -> None:
    assert_env(lambda: relax_gym.make(id, **CASES[id]))
    gymnasium_check(relax_gym.make(id, **CASES[id]), skip_render_check=True)


@pytest.mark.parametrize(("id", "best"), list(SOLVED.items()))
def test_the_expert_solves_it_and_chance_does_not(id: str, best: float) -> None:
    env = relax_gym.make(id, **CASES[id])
    assert [play(env, seed, "expert_action") for seed in range(20)] == [best] * 20
    assert np.mean([play(env, seed, "random_action") for seed in range(40)]) < 0.6 * best


@pytest.mark.parametrize("id", SOLVED)
def test_a_seed_draws_the_same_picture_and_another_seed_another(id: str) -> None:
    first, second = relax_gym.make(id, **CASES[id]), relax_gym.make(id, **CASES[id])
    seen = []
    for seed in range(5):
        (one,), (two,) = pictures(first.reset(seed=seed)[0]), pictures(second.reset(seed=seed)[0])
        assert one.dtype == np.uint8
        assert np.array_equal(one, two)
        seen.append(one.tobytes())
    assert len(set(seen)) == 5
