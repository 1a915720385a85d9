"""What holds for every env that asks questions about videos and sounds."""

from __future__ import annotations

import inspect
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from command import run
from gymnasium.utils.env_checker import check_env
from question_solvers import parts, text_of

import relax_gym
from relax_gym.conformance import same
from relax_gym.env import check_step
from relax_gym.errors import ConfigError
from relax_gym.testing import assert_env
from relax_gym_envs._quiz import option_named

Case = tuple[str, dict[str, Any]]
TINY_VIDEO = {"size": 32, "objects": 1, "questions": ["direction"], "style": "terse"}
TINY_AUDIO = {"rate": 4000, "questions": ["pitch"], "replays": 0, "style": "terse"}
CASES: list[Case] = [
    ("relax_gym/VideoQuestion-v0", {}),
    ("relax_gym/VideoQuestion-v0", {"turns": 2, **TINY_VIDEO}),
    ("relax_gym/VideoQuestion-v0", {"turns": 5, "same_clip": True, "frames": 6, "size": 64}),
    ("relax_gym/AudioQuestion-v0", {}),
    ("relax_gym/AudioQuestion-v0", {"turns": 3, **TINY_AUDIO}),
    ("relax_gym/OmniQuestion-v0", {"size": 32, "rate": 4000}),
    ("relax_gym/OmniQuestion-v0", {"turns": 2, "sound_in_video": True, "size": 32, "rate": 4000, "style": "terse"}),
]
GARBAGE = ["", " \n\t", "\x00\ud800", "٣", "9" * 6000, "1,x" * 20_000, "(" * 10_000, "-1", "leftright", "0.1"]


def make(case: Case, **kwargs: Any) -> Any:
    return relax_gym.make(case[0], **{**case[1], **kwargs})


def episode(env: Any, seed: int, policy: str = "expert_action") -> list[Any]:
    """(observations, total reward, last info) of an episode."""
    observation, _ = env.reset(seed=seed)
    observations, total, done, info = [observation], 0.0, False, {}
    while not done:
        observation, reward, done, _, info = env.step(getattr(env, policy)())
        observations.append(observation)
        total += reward
    return [observations, total, info]


def arrays(value: Any) -> list[np.ndarray]:
    """All arrays that plain media parts of observations hold."""
    if isinstance(value, np.ndarray):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [array for item in value for array in arrays(item)] if isinstance(value, list | tuple) else []


@pytest.mark.parametrize("case", CASES, ids=str)
def test_contract(case: Case) -> None:
    assert_env(case[0], **case[1])
    assert_env(case[0], **case[1], shuffle_media=True)
    env = gymnasium.make(case[0], disable_env_checker=True, **case[1])
    check_env(env.unwrapped, skip_render_check=True)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_expert_reaches_1(case: Case) -> None:
    env = make(case)
    for seed in range(25):
        _, total, info = episode(env, seed)
        assert total == pytest.approx(1.0)
        assert info == {"correct": True}


@pytest.mark.parametrize(
    ("case", "chance"),
    [(CASES[1], 1 / 4), (CASES[4], 1 / 3), (CASES[5], 1 / 4), (("relax_gym/AudioQuestion-v0", {"rate": 4000}), 0.303)],
    ids=str,
)
def test_random_answers_are_right_by_chance(case: Case, chance: float) -> None:
    env = make(case, turns=10)
    rewards = [episode(env, seed, "random_action")[1] for seed in range(40)]
    assert np.mean(rewards) == pytest.approx(chance, abs=0.08)  # more than three standard errors of 400 answers


@pytest.mark.parametrize("case", CASES, ids=str)
def test_same_seed_same_media_in_new_arrays(case: Case) -> None:
    env = make(case)
    episode(env, 5, "random_action")
    first, again, fresh = episode(env, 11)[0], episode(env, 11)[0], episode(make(case), 11)[0]
    assert same(first, again)
    assert same(first, fresh)
    assert not same(first, episode(env, 12)[0])
    held = [*arrays(first), *arrays(again)]
    assert not any(np.shares_memory(a, b) for i, a in enumerate(held) for b in held[:i])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_done_to_the_media_of_a_turn_does_not_reach_the_next(case: Case) -> None:
    spoilt, kept = make(case, turns=3), make(case, turns=3)
    observation, expected = spoilt.reset(seed=3)[0], kept.reset(seed=3)[0]
    for _ in range(2):
        for array in arrays(observation):
            if array.flags.writeable:
                array[...] = 0
        observation, expected = (env.step(env.expert_action()).observation for env in (spoilt, kept))
        assert same(observation, expected)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_shuffled_media_come_with_the_same_questions_and_answers(case: Case) -> None:
    for seed in range(5):
        plain, shuffled = make(case), make(case, shuffle_media=True)
        one, other = episode(plain, seed)[0], episode(shuffled, seed)[0]
        assert [text_of(observation) for observation in one] == [text_of(observation) for observation in other]
        assert plain.question == shuffled.question
        assert not same(one[0], other[0])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_state_is_small_and_goes_on(case: Case) -> None:
    env, other = make(case, turns=4), make(case, turns=4)
    env.reset(seed=4)
    env.step(env.expert_action())
    stored = pickle.dumps(env.get_state())
    assert len(stored) < 20_000
    other.reset(seed=9)
    other.set_state(pickle.loads(stored))
    for _ in range(3):
        assert same(env.step(env.expert_action()), other.step(other.expert_action()))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_garbage_never_raises_and_earns_nothing(case: Case) -> None:
    for garbage in GARBAGE:
        env = make(case)
        env.reset(seed=2)
        result = check_step(env.step(garbage))
        assert result.reward == 0.0
        assert len(text_of(result.observation)) < 500


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("left", "left"),
        (" Left.\n", "left"),
        ("It goes RIGHT!", "right"),
        ("Not left but right", "right"),
        ("<answer>left</answer>", "left"),
        ("leftover", None),
        ("", None),
    ],
)
def test_a_word_is_read_out_of_a_sentence(text: str, named: str | None) -> None:
    assert option_named(text, ("left", "right")) == named


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("3", "3"),
        ("Three.", "3"),
        ("There are **two** beeps, I think", "2"),
        ("1. I hear 2 beeps", "2"),
        ("13", None),
        ("-1", None),
        ("1.5", None),
        ("someone", None),
    ],
)
def test_a_number_is_read_in_digits_or_words(text: str, named: str | None) -> None:
    assert option_named(text, ("1", "2", "3")) == named


def test_plain_says_how_it_went_and_terse_does_not() -> None:
    env = make(CASES[0], turns=2, questions=["count"])
    env.reset(seed=0)
    assert env.question.answer == "1"
    result = env.step("I saw 2.")
    assert text_of(result.observation).startswith("Wrong. The answer is 1.\nHow many shapes appear? Reply with one of:")
    result = env.step(f"It is {env.question.answer}!")
    assert result[:4] == ([{"role": "user", "content": "Correct."}], 0.5, True, False)
    assert result.info == {"correct": False}
    env = make(CASES[1])
    observation, _ = env.reset(seed=0)
    assert text_of(observation) == "direction?"
    assert text_of(env.step(f" {env.question.answer}").observation) == "direction?"
    assert env.step(env.question.answer) == ([], 0.5, True, False, {"correct": False})


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (("Video", {"size": 34}), "size is 34; it must be a multiple of 4, such as 32"),
        (("Video", {"objects": 1}), "objects is 1; it must be a whole number from 2 to 4"),
        (
            ("Video", {"questions": "count"}),
            "questions is 'count'; it must be a list of at least one of direction, count, order",
        ),
        (
            ("Audio", {"questions": ["beat"]}),
            "questions is 'beat'. Known: pitch, compare, count, rhythm, digit",
        ),
        (("Audio", {"rate": 2000}), "rate is 2000; it must be a whole number from 4000 to 48000"),
        (
            ("Omni", {"modalities": ["image", "video"], "sound_in_video": True}),
            "sound_in_video needs video and audio, but modalities is ['image', 'video']; add them or leave it out",
        ),
    ],
    ids=str,
)
def test_wrong_arguments_say_what_is_allowed(case: Case, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        relax_gym.make(f"relax_gym/{case[0]}Question-v0", **case[1])
    assert str(error.value) == message


@pytest.mark.parametrize("id", sorted({case[0] for case in CASES}))
def test_they_are_shown_and_documented(id: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "envs", "show", id)
    assert code == 0
    assert "reward 1  terminated" in out
    text = (Path(__file__).parent.parent / "docs" / "environments.md").read_text(encoding="utf-8")
    assert f"| `{id}` |" in text
    for argument in inspect.signature(relax_gym.spec(id).load()).parameters:
        assert f"`{argument}" in text


def test_omni_media_come_in_any_order() -> None:
    env = make(("relax_gym/OmniQuestion-v0", {"size": 32, "rate": 4000}))
    orders = Counter(tuple(part["type"] for part in env.reset(seed=seed)[0][0]["content"]) for seed in range(60))
    assert len(orders) == 6
    assert {order[-1] for order in orders} == {"text"}
    assert len(parts(env.reset(seed=0)[0], "video")[0]["video"]) == 4
