"""What holds for every built-in text environment."""

from __future__ import annotations

import inspect
import pickle
import re
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

import relax_gym
from relax_gym.env import check_reset, check_step
from relax_gym.errors import ConfigError

ROWS = [{"prompt": f"{n} + {n}?", "answer": str(2 * n)} for n in range(2, 7)]
# id, constructor arguments, the reward the expert must reach
CASES: list[tuple[str, dict[str, Any], float]] = [
    ("relax_gym/GuessNumber-v0", {}, 1.0),
    ("relax_gym/GuessNumber-v0", {"low": 1, "high": 15, "max_guesses": 4, "style": "terse"}, 1.0),
    ("relax_gym/Calculator-v0", {}, 1.0),
    ("relax_gym/Calculator-v0", {"operations": 8, "digits": 9}, 1.0),
    ("relax_gym/CalculatorChat-v0", {}, 1.0),
    ("relax_gym/CalculatorChat-v0", {"low": 0, "high": 20000, "shots": 3}, 1.0),
    *[("relax_gym/WordProblems-v0", {"level": level}, 1.0) for level in range(1, 7)],
    ("relax_gym/WordProblems-v0", {"level": 4, "answer_format": "boxed", "retries": 0}, 1.0),
    ("relax_gym/Wordle-v0", {}, 1.0),
    ("relax_gym/TicTacToe-v0", {"opponent": "perfect"}, 0.5),
    ("relax_gym/TicTacToe-v0", {"opponent": "random"}, 0.5),
    ("relax_gym/GridWorld-v0", {}, 1.0),
    ("relax_gym/GridWorld-v0", {"size": 9, "walls": 0.6}, 1.0),
    ("relax_gym/Dataset-v0", {"rows": ROWS, "match": "exact"}, 1.0),
    ("relax_gym/Dataset-v0", {"rows": ROWS, "match": "numeric", "system": "Be brief."}, 1.0),
]
GARBAGE = [
    "",
    " \n\t",
    "\x00\ud800",
    "٣",
    "¹",
    "K" * 5,
    "İİİİİ",
    "-1",
    "0",
    "9" * 6000,
    "1," * 50_000,
    "(" * 10_000,
    "calc(00 + 1)",
    "calc(" + "9" * 9000 + " * 2)",
    '<tool_call>{"name": "calculate", "arguments": {"expression": "9**9**9**9"}}</tool_call>',
    '<tool_call>{"name": "nothing"}</tool_call><tool_call>{',
    "{0} {a} %s \\boxed{}",
    "abcde",
]


def make(case: tuple[str, dict[str, Any], float]) -> Any:
    return relax_gym.make(case[0], **case[1])


def episode(env: Any, seed: int, policy: str) -> list[Any]:
    """Everything the env says in one episode that is cut after 30 turns."""
    log: list[Any] = [check_reset(env.reset(seed=seed))]
    for _ in range(30):
        action = getattr(env, policy)()
        result = check_step(env.step(action))
        log += [action, result]
        if result.terminated:
            break
    return log


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gymnasium_checker(case: tuple[str, dict[str, Any], float]) -> None:
    env = gymnasium.make(case[0], disable_env_checker=True, **case[1])
    check_env(env.unwrapped, skip_render_check=True)
    checked = gymnasium.make(case[0], disable_env_checker=False, **case[1])
    checked.reset(seed=1)
    checked.step("1")
    checked.close()


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("policy", ["expert_action", "random_action"])
def test_same_seed_same_episode_in_a_used_env_too(case: tuple[str, dict[str, Any], float], policy: str) -> None:
    used = make(case)
    episode(used, 5, "random_action")
    first, again = episode(used, 11, policy), episode(make(case), 11, policy)
    assert first == again


@pytest.mark.parametrize("case", [case for case in CASES if case[1].get("opponent") != "perfect"], ids=str)
def test_seeds_differ(case: tuple[str, dict[str, Any], float]) -> None:
    env = make(case)
    assert len({repr(episode(env, seed, "expert_action")) for seed in range(6)}) >= 3


@pytest.mark.parametrize("case", CASES, ids=str)
def test_expert_reaches_the_top(case: tuple[str, dict[str, Any], float]) -> None:
    env = make(case)
    for seed in range(25):
        log = episode(env, seed, "expert_action")
        assert log[-1].terminated
        assert sum(result.reward for result in log[2::2]) >= case[2]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_asking_for_actions_does_not_disturb_the_episode(case: tuple[str, dict[str, Any], float]) -> None:
    asked, left_alone = make(case), make(case)
    asked.reset(seed=3)
    left_alone.reset(seed=3)
    for _ in range(10):
        asked.random_action()
        asked.expert_action()
    action = left_alone.expert_action()
    assert asked.step(action) == left_alone.step(action)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_state_resumes_in_another_env(case: tuple[str, dict[str, Any], float]) -> None:
    env, other = make(case), make(case)
    env.reset(seed=4)
    env.step("no such thing" if "TicTac" in case[0] or "Grid" in case[0] else env.random_action())
    saved = pickle.dumps(env.get_state())
    other.reset(seed=9)
    other.set_state(pickle.loads(saved))
    for _ in range(3):
        assert env.random_action() == other.random_action()
        action = env.expert_action()
        assert action == other.expert_action()
        result = env.step(action)
        assert other.step(action) == result
        if result.terminated:
            break
    assert len(saved) < 20_000


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("index", range(len(GARBAGE)))
def test_garbage_never_raises_and_earns_nothing(case: tuple[str, dict[str, Any], float], index: int) -> None:
    env = make(case)
    observation, _ = check_reset(env.reset(seed=2))
    assert observation in env.observation_space
    for _ in range(8):
        result = check_step(env.step(GARBAGE[index]))
        assert result.observation in env.observation_space
        assert type(result.reward) is float  # K77
        assert result.reward <= 0.1
        assert sum(len(str(message["content"])) for message in result.observation) < 1000
        if result.terminated:
            break


@pytest.mark.parametrize(
    ("id", "kwargs", "message"),
    [
        ("GuessNumber", {"style": "ters"}, "style is 'ters'; did you mean 'terse'? Known: plain, terse"),
        ("GuessNumber", {"low": 5, "high": 5}, "low is 5; it must be a whole number from 0 to 4"),
        ("CalculatorChat", {"shots": 4}, "shots is 4; it must be a whole number from 0 to 3"),
        ("Calculator", {"digits": 0}, "digits is 0; it must be a whole number from 1 to 9"),
        ("WordProblems", {"level": 7}, "level is 7; it must be a whole number from 1 to 6"),
        ("TicTacToe", {"opponent": "perfekt"}, "opponent is 'perfekt'; did you mean 'perfect'? Known: random, perfect"),
        ("GridWorld", {"walls": 0.9}, "walls is 0.9; it must be a number from 0.0 to 0.6"),
        ("Wordle", {"max_guesses": True}, "max_guesses is True; it must be a whole number from 1 to 1000000"),
    ],
)
def test_wrong_arguments_say_what_is_allowed(id: str, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        relax_gym.make(f"relax_gym/{id}-v0", **kwargs)
    assert str(error.value) == message


def test_the_examples_in_the_docs_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parent.parent / "docs" / "environments.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    exec(compile(code, "environments.md", "exec"), {"__name__": "example"})
    env = relax_gym.make("me/Parrot-v0", words=2)
    observation, _ = env.reset(seed=0)
    word = observation[0]["content"].removeprefix("Say: ")
    assert word in ("red", "green", "blue")
    assert env.step(word) == ([{"role": "user", "content": f"Say: {env.word}"}], 0.5, False, False, {})
    assert env.step(env.expert_action()) == ([], 0.5, True, False, {"correct": True})
    check_env(gymnasium.make("me/Parrot-v0", disable_env_checker=True).unwrapped, skip_render_check=True)
    short = relax_gym.make("me/ShortParrot-v0", words=3)
    short.reset(seed=0)
    assert [short.step(short.expert_action())[2:4] for _ in range(2)] == [(False, False), (False, True)]
    assert len((tmp_path / "parrot-episodes" / "episodes.jsonl").read_text().splitlines()) == 1


def test_the_docs_list_every_env_of_this_file() -> None:
    text = (Path(__file__).parent.parent / "docs" / "environments.md").read_text(encoding="utf-8")
    for id in {case[0] for case in CASES}:
        assert f"| `{id}` |" in text
        for argument in inspect.signature(relax_gym.spec(id).load()).parameters:
            assert f"`{argument}" in text
