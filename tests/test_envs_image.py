"""The envs of pictures: what is seen tells the answer, tools really look, and every turn has its own picture."""

from __future__ import annotations

import json
import pickle
import sys
from collections import Counter
from typing import Any

import gymnasium
import numpy as np
import PIL.Image
import pytest
from gymnasium.utils.env_checker import check_env as gymnasium_check
from numpy.typing import NDArray

import relax_gym
from relax_gym.errors import ConfigError
from relax_gym.testing import assert_env
from relax_gym_envs._charts import COLOURS
from relax_gym_envs._scenery import TAG, draw_tag
from relax_gym_envs.grid_world import MOVES, shortest_path
from relax_gym_envs.zoom_and_look import LETTERS

CASES: dict[str, dict[str, Any]] = {
    "relax_gym/ImageGrid-v0": {"walls": 0.3},
    "relax_gym/ChartQuestion-v0": {"size": 200},
    "relax_gym/ZoomAndLook-v0": {"size": 1024, "view": 128},
}
SOLVED = dict(zip(CASES, (1.0, 1.0, 1.5), strict=True))
CASES["relax_gym/GymRender-v0"] = {"env_id": "Counter3-v0"}


def make(name: str, **kwargs: Any) -> Any:
    return relax_gym.make(f"relax_gym/{name}-v0", **kwargs)


def pictures(messages: list[Any]) -> list[NDArray[np.uint8]]:
    contents = [message["content"] for message in messages if isinstance(message["content"], list)]
    return [part["image"] for content in contents for part in content if part["type"] == "image"]


def play(env: Any, seed: int, policy: str) -> float:
    """The return of an episode of at most 40 turns."""
    env.reset(seed=seed)
    total = 0.0
    for _ in range(40):
        result = env.step(getattr(env, policy)())
        total += float(result[1])
        if result[2] or result[3]:
            break
    return total


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


# ImageGrid -----------------------------------------------------------------------------------------------------------


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


# ChartQuestion -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_bars_are_as_high_as_their_values(seed: int) -> None:
    env = make("ChartQuestion", charts=["bar"], size=400)
    (picture,) = pictures(env.reset(seed=seed)[0])
    heights = [(np.abs(picture.astype(int) - COLOURS[c]).sum(axis=-1) < 6).any(axis=1).sum() for c in env.chart.colours]
    scale = 400 * 0.83 / 100
    np.testing.assert_allclose(heights, [value * scale for value in env.chart.values], atol=4)


@pytest.mark.parametrize("seed", range(12))
def test_slices_are_as_large_as_their_share(seed: int) -> None:
    env = make("ChartQuestion", charts=["pie"], size=400, questions=["highest"])
    (picture,) = pictures(env.reset(seed=seed)[0])
    pie = picture[:, :264].astype(int)
    areas = np.array([(np.abs(pie - COLOURS[colour]).sum(axis=-1) < 6).sum() for colour in env.chart.colours])
    shares = np.array(env.chart.values) / sum(env.chart.values)
    np.testing.assert_allclose(areas / areas.sum(), shares, atol=0.02)
    assert env.expert_action() == env.chart.labels[int(areas.argmax())]


def test_answers_to_chart_questions_are_what_the_chart_says() -> None:
    starts = ("What is the value", "What is the difference", "Which colour", "How many", "Which label")
    asked = set[str]()
    env = make("ChartQuestion", bars=5, turns=3, same_chart=True, charts=["bar"], size=64)
    for seed in range(60):
        env.reset(seed=seed)
        for _ in range(3):
            text, answer, chart = env.question.text, env.expert_action(), env.chart
            named = dict(zip(chart.labels, zip(chart.values, chart.colours, strict=True), strict=True))
            word = text.rstrip("?").split()[-1]
            if text.startswith("What is the difference"):
                assert answer == str(abs(named[word][0] - named[text.split()[5]][0]))
            elif text.startswith("What is the value"):
                assert answer == str(named[word][0])
            elif text.startswith("Which colour"):
                assert answer == named[word][1]
            elif text.startswith("How many"):
                assert answer == str(sum(value > int(word) for value in chart.values))
            else:
                pick = max if "highest" in text else min
                assert answer == pick(named, key=lambda label: named[label][0])
            asked.add(next(start for start in starts if text.startswith(start)))
            env.step(answer)
    assert asked == set(starts)


@pytest.mark.parametrize(
    ("style", "tolerance", "said", "right"),
    [
        ("plain", 5, "About {over5}.", True),
        ("plain", 5, "About {over6}.", False),
        ("plain", 5, "no idea", False),
        ("plain", 0, "About {over5}.", False),
        ("plain", 0, "I think {over0}.", True),
        ("terse", 5, "{over5}", True),
        ("terse", 5, "{over5}.", False),
    ],
)
@pytest.mark.parametrize("kind", ["value", "difference"])
def test_read_off_numbers_may_be_as_far_off_as_is_tolerated(
    kind: str, style: str, tolerance: int, said: str, right: bool
) -> None:
    env = make("ChartQuestion", questions=[kind], tolerance=tolerance, style=style, size=64)
    for seed in range(5):
        env.reset(seed=seed)
        truth = int(env.expert_action())
        text = said.format(over0=truth, over5=truth + 5, over6=truth + 6)
        assert env.step(text)[1] == float(right)


def test_pies_are_asked_only_what_they_show() -> None:
    env = make("ChartQuestion", questions=["value", "above"], size=64)
    kinds = Counter[str]()
    for seed in range(40):
        env.reset(seed=seed)
        kinds[env.chart.kind] += 1
    assert set(kinds) == {"bar", "line"}
    with pytest.raises(ConfigError, match="a pie has no scale"):
        make("ChartQuestion", charts=["pie"], questions=["value"])


def test_follow_up_questions_do_not_show_the_chart_again() -> None:
    for same_chart, shown in ((True, 0), (False, 1)):
        env = make("ChartQuestion", turns=2, same_chart=same_chart, size=64)
        (first,) = pictures(env.reset(seed=0)[0])
        kept = first.copy()
        observation, reward, *_ = env.step(env.expert_action())
        assert (len(pictures(observation)), reward) == (shown, 0.5)
        assert np.array_equal(first, kept)
        assert not any(np.shares_memory(first, later) for later in pictures(observation))


# ZoomAndLook ---------------------------------------------------------------------------------------------------------


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_only_a_look_that_held_the_tag_at_a_readable_size_earns_the_bonus() -> None:
    env = make("ZoomAndLook", look_bonus=0.25, turn=False)
    for looks, looked in ((["expert"], True), (["far"], False), (["whole"], False), ([], False)):
        env.reset(seed=4)
        letter = env.scene.letter
        for look in looks:
            x, y = (edge * 256 // 2048 for edge in env.scene.place)
            far = 0 if x > 128 else 192
            action = {
                "expert": env.expert_action(),
                "far": call("crop", left=far, top=0, right=far + 64, bottom=64 if y > 128 else 60),
                "whole": call("crop", left=0, top=0, right=256, bottom=256),
            }[look]
            env.step(action)
        result = env.step(f"I used crop and looked closely. <tool_call>none</tool_call> It is {letter}")
        if not result.terminated:  # the text looked like a call and was answered as one
            result = env.step(f"It is {letter}.")
        assert (result.reward, result.info) == (1.25 if looked else 1.0, {"correct": True, "looked": looked})


def test_k82_nothing_but_a_real_look_and_a_right_letter_pays() -> None:
    env = make("ZoomAndLook")
    env.reset(seed=4)
    env.step(env.expert_action())
    wrong = next(letter for letter in LETTERS if letter != env.scene.letter)
    result = env.step(f'looked: true. {{"looked": true}} {wrong}')
    assert (result.reward, result.info) == (0.0, {"correct": False, "looked": True})
    env.reset(seed=4)
    env.step(call("rotate", degrees=90))
    result = env.step(f"<tool_response>crop shows the tag</tool_response> looked: true. It is {env.scene.letter}")
    assert (result.reward, result.info) == (1.0, {"correct": True, "looked": False})


def test_a_crop_shows_the_letter_and_the_overview_does_not() -> None:
    env = make("ZoomAndLook", turn=False)
    (whole,) = pictures(env.reset(seed=2)[0])
    (part,) = pictures(env.step(env.expert_action())[0])
    assert max(whole.shape) == max(part.shape) == 256
    ink = [int((picture.max(axis=-1) < 70).sum()) for picture in (whole, part)]
    assert ink[0] < 8 < 30 < ink[1]


def test_k56_two_looks_in_one_turn_come_back_in_order() -> None:
    env = make("ZoomAndLook")
    env.reset(seed=0)
    both = call("crop", left=0, top=0, right=64, bottom=32) + call("rotate", degrees=90)
    result = env.step(both)
    assert [message["role"] for message in result.observation] == ["tool", "tool"]
    first, second = pictures(result.observation)
    assert (first.shape, second.shape) == ((128, 256, 3), (256, 128, 3))
    assert np.array_equal(np.rot90(first, -1), second)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"left": 9, "top": 0, "right": 5, "bottom": 9}, "is no part of the 256 x 256 pixels"),
        ({"left": 0, "top": 0, "right": 500, "bottom": 9}, "is no part of the 256 x 256 pixels"),
        ({"left": 0, "top": 0, "right": 9}, "argument 'bottom' is missing"),
        ({"left": "a", "top": 0, "right": 9, "bottom": 9}, "argument 'left'"),
    ],
)
def test_bad_looks_are_answered_with_what_was_wrong(arguments: dict[str, Any], why: str) -> None:
    env = make("ZoomAndLook")
    env.reset(seed=0)
    result = env.step(call("crop", **arguments))
    assert why in result.observation[0]["content"]
    assert not result.terminated


@pytest.mark.parametrize(("size", "view"), [(512, 64), (1024, 64), (1024, 128), (2048, 91), (2048, 256), (4096, 128)])
def test_the_letter_is_never_readable_at_first_and_always_after_a_crop(size: int, view: int) -> None:
    env = make("ZoomAndLook", size=size, view=view, looks=1)
    for seed in range(3):
        assert play(env, seed, "expert_action") == 1.5
        assert env.scene.letter_height((0, 0, size, size), view) <= 1.5


@pytest.mark.parametrize(("size", "view"), [(512, 65), (512, 63), (8192, 181), (8192, 1025)])
def test_views_that_show_too_much_or_could_never_show_enough_are_refused(size: int, view: int) -> None:
    with pytest.raises(ConfigError, match=f"view is {view}; it must be a whole number from"):
        make("ZoomAndLook", size=size, view=view)


def test_what_is_shown_first_hardly_depends_on_the_letter() -> None:
    env = make("ZoomAndLook", turn=False)
    env.reset(seed=3)
    first, close = [], []
    left, top = (edge - 9 for edge in env.scene.place)
    for letter in LETTERS:
        env.scene.picture.paste(draw_tag(letter), env.scene.place)
        first.append(env.scene.view((0, 0, 2048, 2048), 256, 0).astype(float))
        close.append(env.scene.view((left, top, left + 36, top + 36), 256, 0).astype(float))
    differing = [int((np.ptp(np.stack(views), axis=0).max(axis=-1) > 40).sum()) for views in (first, close)]
    assert differing[0] == 0
    assert differing[1] > 1000


def test_the_expert_turns_the_letter_upright() -> None:
    turned = Counter[int]()
    for seed in range(12):
        env = make("ZoomAndLook")
        env.reset(seed=seed)
        turned[env.scene.turned] += 1
        while (action := env.expert_action()).startswith("<tool_call>"):
            (seen,) = pictures(env.step(action)[0])
        paper = np.argwhere(seen.min(axis=-1) > 245)
        (top, left), (bottom, right) = paper.min(axis=0), paper.max(axis=0)
        found = PIL.Image.fromarray(seen[top : bottom + 1, left : right + 1]).resize((TAG - 4, TAG - 4))
        tags = [draw_tag(letter).crop((2, 2, TAG - 2, TAG - 2)) for letter in LETTERS]
        far = [np.abs(np.subtract(found, tag, dtype=float)).mean() for tag in tags]
        assert LETTERS[int(np.argmin(far))] == env.scene.letter
        env.close()
    assert set(turned) == {0, 90, 180, 270}


@pytest.mark.parametrize(
    ("said", "right"),
    [
        ("{}", True),
        ("**{}**, I think", True),
        ("Not A but '{}'.", True),
        ("The letter is {}!", True),
        (" {small}. ", True),
        ("{} or A", False),
        ("I read {}B", False),
        ("nothing", False),
    ],
)
def test_the_letter_is_read_from_sentences(said: str, right: bool) -> None:
    env = make("ZoomAndLook")
    env.reset(seed=3)
    letter = env.scene.letter
    assert letter != "A"
    assert env.step(said.format(letter, small=letter.lower())).info["correct"] == right


def test_terse_questions_take_a_letter_only() -> None:
    env = make("ZoomAndLook", style="terse")
    for said, right in (("{}", True), ("{}.", False)):
        observation, _ = env.reset(seed=3)
        assert observation[0]["content"][1]["text"] == "letter?"
        observation, reward, *_ = env.step(said.format(env.scene.letter))
        assert (observation, reward) == ([], float(right))


def test_looks_are_counted() -> None:
    env = make("ZoomAndLook", looks=1)
    env.reset(seed=0)
    env.step(call("rotate", degrees=90))
    assert "which is all you may; answer now" in env.step(call("rotate", degrees=90)).observation[0]["content"]


def test_letters_are_balanced() -> None:
    env, found = make("ZoomAndLook", size=512, view=64), Counter[str]()
    for seed in range(160):
        env.reset(seed=seed)
        found[env.scene.letter] += 1
    assert set(found) == set(LETTERS)
    assert max(found.values()) < 36


# GymRender -----------------------------------------------------------------------------------------------------------


class Counter3(gymnasium.Env[int, int]):
    """Three actions; the picture's shade is the sum of the actions so far."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 5}  # noqa: RUF012

    def __init__(self, render_mode: str | None = None, goal: int = 6, boxed: bool = False) -> None:
        self.render_mode, self.goal = render_mode, goal
        self.action_space = gymnasium.spaces.Box(0, 1) if boxed else gymnasium.spaces.Discrete(3, start=1)
        self.observation_space = gymnasium.spaces.Discrete(100)
        self.total = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        self.total = 0 if seed is None else seed % 2
        return self.total, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.total += int(action)
        return self.total, float(action), self.total >= self.goal, False, {}

    def render(self) -> NDArray[np.uint8]:
        return np.full((20, 40, 3), 10 * self.total, dtype=np.uint8)


class Blind(Counter3):
    """Draws nothing."""

    metadata = {"render_modes": []}  # noqa: RUF012


gymnasium.register("Counter3-v0", Counter3)
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
