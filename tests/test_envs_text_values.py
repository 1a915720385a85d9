"""What each built-in text environment says and pays, in literal values."""

from __future__ import annotations

import json
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

import relax_gym
from relax_gym_envs._arithmetic import calculate, show
from relax_gym_envs._text import last_number
from relax_gym_envs._word_problem_templates import LEVELS
from relax_gym_envs.grid_world import shortest_path
from relax_gym_envs.tic_tac_toe import best_cells, outcome
from relax_gym_envs.wordle import WORDS, feedback


def start(name: str, seed: int = 0, state: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    """A freshly reset env, with some of its state replaced."""
    env = relax_gym.make(f"relax_gym/{name}-v0", **kwargs)
    env.reset(seed=seed)
    env.set_state(state or {})
    return env


def said(result: Any) -> tuple[str | None, float, bool]:
    """(text of the only message, reward, terminated)."""
    text = result.observation[0]["content"] if result.observation else None
    return text, result.reward, result.terminated


def test_guess_number_terse() -> None:
    kwargs = {"low": 1, "high": 15, "max_guesses": 4, "style": "terse"}
    env = relax_gym.make("relax_gym/GuessNumber-v0", **kwargs)
    assert env.reset(seed=0) == ([{"role": "user", "content": "guess 1-15"}], {})
    assert env.get_state()["secret"] == 14
    env.set_state({"secret": 13})
    assert [said(env.step(guess)) for guess in ("8", "99", "1", "2")] == [
        ("higher", 0.0, False),
        ("lower", 0.0, False),
        ("higher", 0.0, False),
        (None, 0.0, True),
    ]
    env = start("GuessNumber", state={"secret": 13}, **kwargs)
    assert [said(env.step(env.expert_action())) for _ in range(3)] == [
        ("higher", 0.0, False),
        ("higher", 0.0, False),
        ("lower", 0.0, False),
    ]
    assert env.expert_action() == "13"
    assert env.step("13") == ([], 1.0, True, False, {"correct": True})


@pytest.mark.parametrize("action", [" 8", "8\n", "8.", "008", "", "x", "-1", "８"])
def test_guess_number_terse_takes_one_or_two_digits_only(action: str) -> None:
    env = start("GuessNumber", low=1, high=15, style="terse", invalid_reward=-0.5)
    assert env.step(action) == ([], -0.5, True, False, {"correct": False})


def test_guess_number_plain() -> None:
    env = start("GuessNumber", state={"secret": 7}, max_guesses=2)
    assert said(env.step(" 5.\n")) == ("Higher.", 0.0, False)
    assert said(env.step("8")) == ("Out of guesses. It was 7.", 0.0, True)
    assert said(start("GuessNumber").step("seven")) == ("That is not a number.", -0.2, True)
    assert said(start("GuessNumber", state={"secret": 7}).step("7")) == ("Correct!", 1.0, True)


PROBLEM = {"a": 30, "b": 14, "sign": "-"}


def test_calculator_chat_prompt() -> None:
    observation, _ = relax_gym.make("relax_gym/CalculatorChat-v0").reset(seed=1)
    assert observation == [
        {"role": "system", "content": "Write calc(a + b), calc(a - b) or calc(a * b), then Answer: result."},
        {"role": "user", "content": "Bob has 52 hats and loses 17. How many hats are left?"},
        {"role": "assistant", "content": "calc(52 - 17)"},
        {"role": "user", "content": "35"},
        {"role": "assistant", "content": "Answer: 35"},
        {"role": "user", "content": "Ann has 29 coins and gets 84 more. How many coins in total?"},
    ]
    lengths = [len(relax_gym.make("relax_gym/CalculatorChat-v0", shots=n).reset(seed=1)[0]) for n in range(4)]
    assert lengths == [2, 6, 10, 14]


@pytest.mark.parametrize(
    ("call", "result", "first", "answer", "second"),
    [
        ("calc(30 - 14)", "16", 0.5, "Answer: 16", 0.5),
        (" calc(30-14) \n", "16", 0.5, "Answer: 16\n", 0.5),
        ("calc(30 - 14)", "16", 0.5, "Answer: 17", 0.0),
        ("calc(30 - 14)", "16", 0.5, "16", 0.0),
        ("calc(8 * 2)", "16", 0.5, "Answer: 16", 0.5),
        ("calc(14 - 30)", "-16", 0.05, "Answer: -16", 0.0),
        ("calc(05 + 11)", "0", 0.05, "Answer: 0", 0.0),
        ("calc(9999 * 9999)", "99980001", 0.05, "Answer: 16", 0.0),
    ],
)
def test_calculator_chat_rewards(call: str, result: str, first: float, answer: str, second: float) -> None:
    env = start("CalculatorChat", state=PROBLEM)
    assert env.step(call) == ([{"role": "user", "content": result}], first, False, False, {})
    assert env.step(answer) == ([], second, True, False, {"correct": second == 0.5})


@pytest.mark.parametrize("call", ["16", "Calc(30 - 14)", "calc(30 / 14)", "calc(10000 - 14)", "calc(a - b)"])
def test_calculator_chat_ends_without_a_call(call: str) -> None:
    assert start("CalculatorChat", state=PROBLEM).step(call) == ([], 0.0, True, False, {"correct": False})


def call(expression: str, name: str = "calculate") -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': {'expression': expression}})}</tool_call>"


def test_calculator_tool() -> None:
    env = start("Calculator", state={"value": 42})
    assert [tool["function"]["name"] for tool in env.tools] == ["calculate"]
    assert env.tools[0]["function"]["parameters"]["properties"]["expression"]["type"] == "string"
    assert said(env.step(call("(12 + 30) * 4 - 126"))) == ("42", 0.0, False)
    assert env.step("So it is 42.0.") == ([], 1.0, True, False, {"correct": True})
    assert said(start("Calculator", state={"value": 42}).step("42 or 43")) == (None, 0.0, True)


def test_k79_k80_bad_calls_are_told_and_the_episode_goes_on() -> None:
    env = start("Calculator")
    result = env.step(call("1 + 1") + call("1 +") + call("2", name="calculat") + "<tool_call>{oops</tool_call>")
    texts = [message["content"] for message in result.observation]
    assert texts[:2] == ["2", "Error: '1 +' is not a complete expression"]
    assert texts[2].startswith("Error: unknown tool 'calculat'; did you mean 'calculate'?")
    assert texts[3].startswith("Error: this tool call cannot be read")
    assert (result.reward, result.terminated) == (0.0, False)


def test_k81_crafted_expressions_have_no_side_effect_and_no_huge_powers(tmp_path: Path) -> None:
    env, target = start("Calculator"), tmp_path / "owned"
    for payload in (
        f"__import__('pathlib').Path({str(target)!r}).touch()",
        "().__class__.__mro__[1].__subclasses__()",
        "[x for x in (1,)]",
        "1 if 1 else 2",
        "９**9",
    ):
        assert said(env.step(call(payload)))[0] == "Error: only numbers, + - * / // % ** and parentheses are allowed"
    assert not target.exists()
    began = time.perf_counter()
    assert said(env.step(call("9 ** 9 ** 9")))[0] == "Error: an exponent must be a whole number from -100 to 100"
    assert said(env.step(call("10 ** 99 * 100")))[0] == "Error: the numbers get too long"
    assert said(env.step(call("(" * 5000)))[0] == "Error: the expression has 5000 characters; at most 200 are allowed"
    assert said(env.step(call("(" * 190 + "1")))[0] is not None
    assert said(env.step(call("1 / 0")))[0] == "Error: division by zero"
    assert time.perf_counter() - began < 2


@pytest.mark.parametrize(
    ("expression", "value", "shown"),
    [
        ("2 + 3 * 4", Fraction(14), "14"),
        ("-(2 - 5) ** 3", Fraction(27), "27"),
        ("0.1 + 0.2", Fraction(3, 10), "0.3"),
        ("10 / 4", Fraction(5, 2), "2.5"),
        ("7 // 2 + 7 % 4", Fraction(6), "6"),
        ("2 ** -2", Fraction(1, 4), "0.25"),
        ("1 / 3", Fraction(1, 3), "0.333333333333"),
        ("99999999 * 99999999", Fraction(9999999800000001), "9999999800000001"),
    ],
)
def test_arithmetic(expression: str, value: Fraction, shown: str) -> None:
    assert calculate(expression) == value
    assert show(calculate(expression)) == shown


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("12", "12"),
        ("It costs $1,234.50.", "1234.5"),
        ("1 + 2 = 3.", "3"),
        ("minus: -7", "-7"),
        ("\u22127 degrees", "-7"),
        ("-$5", "-5"),
        ("5-3", "3"),
        ("(2)-3", "3"),
        ("x=-3", "-3"),
        ("3, 4", "4"),
        ("1,2345", "2345"),
        ("12,345,678", "12345678"),
        (".5", "0.5"),
        ("so...5", "5"),
        ("\\boxed{-0.25}", "-0.25"),
        ("100%", "100"),
        ("none", None),
        ("", None),
    ],
)
def test_last_number(text: str, number: str | None) -> None:
    assert last_number(text) == (None if number is None else Decimal(number))


def test_last_number_is_fast_on_a_million_characters() -> None:
    began = time.perf_counter()
    assert last_number("1," * 500_000) == 1
    assert last_number("111," * 250_000 + "1111") == 1111
    assert last_number("9" * 1_000_000) != 0
    assert time.perf_counter() - began < 5


def test_word_problem() -> None:
    env = relax_gym.make("relax_gym/WordProblems-v0", level=4, answer_format="boxed")
    observation, _ = env.reset(seed=0)
    assert observation == [
        {
            "role": "user",
            "content": "Eva scored 15 points and Max 2. What is their average? "
            "Think, then put the number in \\boxed{}.",
        }
    ]
    assert env.expert_action() == "\\boxed{8.5}"
    assert said(env.step("(15 + 2) / 2 = 8.50")) == ("Correct.", 1.0, True)


def test_word_problem_retry() -> None:
    env = start("WordProblems", state={"answer": Decimal("8.5")})
    assert said(env.step("eight and a half")) == ("I found no number in your reply. Try again.", 0.0, False)
    assert said(env.step("8.5")) == ("Correct.", 0.5, True)
    env = start("WordProblems", state={"answer": Decimal("-1200")}, retries=2)
    assert [said(env.step(text)) for text in ("-1,201", "1,200", "12 - 1,200")] == [
        ("That is not right. Try again.", 0.0, False),
        ("That is not right. Try again.", 0.0, False),
        ("Wrong. It is -1200.", 0.0, True),
    ]
    assert said(start("WordProblems", state={"answer": Decimal(3)}, retries=0).step("4"))[1:] == (0.0, True)


def test_word_problem_answers_by_hand() -> None:
    """Every template with a = 4, b = 3, c = 5: {ab} is 12, {a20} 80, {b5} 15."""
    assert [[answer(4, 3, 5) for _, answer in level] for level in LEVELS] == [
        [7, 8, 12, -8],
        [12, 3, 4, 84],
        [17, 8, 235, 14],
        [68, 12, 92, 3.5],
        [125, 73, 29],
        [340, 11, 18],
    ]


@pytest.mark.parametrize(
    ("guess", "target", "marks"),
    [
        ("babes", "abbey", "YYGG."),
        ("kebab", "abbey", ".YGYY"),
        ("abbey", "abbey", "GGGGG"),
        ("allay", "abbey", "G...G"),
        ("speed", "abide", "..Y.Y"),
        ("speed", "erase", "Y.YY."),
        ("eerie", "sleep", "YY..."),
        ("crane", "moist", "....."),
    ],
)
def test_wordle_feedback(guess: str, target: str, marks: str) -> None:
    assert feedback(guess, target) == marks


def test_wordle() -> None:
    env = start("Wordle", state={"target": "abbey"}, max_guesses=4)
    assert said(env.step("Babes!")) == ("b a b e s\nY Y G G .\nTries left: 3", 0.0, False)
    assert said(env.step("six letters")) == ("That is not a word of five letters.\nTries left: 2", 0.0, False)
    assert said(env.step("ábbey")) == ("That is not a word of five letters.\nTries left: 1", 0.0, False)
    assert said(env.step("crane")) == ("c r a n e\n. . Y . Y\nThe word was abbey.", 0.0, True)
    assert said(start("Wordle", state={"target": "crane"}).step(" CRANE.")) == ("Correct!", 1.0, True)


def test_wordle_words_and_expert() -> None:
    assert len(WORDS) == len(set(WORDS)) == 209
    assert all(len(word) == 5 and word.isascii() and word.islower() for word in WORDS)
    for target in WORDS:
        env = start("Wordle", state={"target": target})
        while not (result := env.step(env.expert_action())).terminated:
            pass
        assert result.reward == 1.0


def test_tic_tac_toe_outcomes_and_minimax() -> None:
    assert [outcome(board) for board in ("XXX OO   ", "OX OX O X", "XOXXOOOXX", "         ", "X O  X  O")] == [
        "win",
        "loss",
        "draw",
        None,
        None,
    ]
    assert best_cells("XX OO    ", "X") == ["3"]
    assert best_cells("XX  O    ", "O") == ["3"]
    assert best_cells("X        ", "O") == ["5"]


def test_tic_tac_toe() -> None:
    env = start("TicTacToe", state={"board": "XX OO    "})
    assert said(env.step("3.")) == ("X X X\nO O 6\n7 8 9\nResult: win.", 1.0, True)
    env = start("TicTacToe", state={"board": "OO XX   O"}, opponent="perfect")
    assert said(env.step("8")) == ("O O O\nX X 6\n7 X O\nResult: loss.", 0.0, True)
    env = start("TicTacToe", state={"board": "XOXXOOO X"})
    assert said(env.step("8")) == ("X O X\nX O O\nO X X\nResult: draw.", 0.5, True)


def test_tic_tac_toe_third_illegal_move_loses() -> None:
    env = start("TicTacToe", state={"board": "XO       "})
    again = "Illegal. Reply with a free cell.\nX O 3\n4 5 6\n7 8 9"
    assert [said(env.step(action)) for action in ("1", "ten", "0")] == [
        (again, 0.0, False),
        (again, 0.0, False),
        ("Illegal again. You lose.", 0.0, True),
    ]


def test_tic_tac_toe_expert_never_loses_and_mostly_beats_random() -> None:
    returns: dict[str, list[float]] = {"random": [], "perfect": []}
    for opponent, scores in returns.items():
        for seed in range(60):
            env = start("TicTacToe", seed, opponent=opponent)
            while not (result := env.step(env.expert_action())).terminated:
                pass
            scores.append(result.reward)
    assert set(returns["perfect"]) == {0.5}
    assert min(returns["random"]) >= 0.5
    assert sum(returns["random"]) > 54


MAZE = {"here": (0, 0), "goal": (1, 1), "walls": frozenset({(1, 0)}), "left": 5}


def test_grid_world() -> None:
    env = start("GridWorld", state=MAZE, size=2)
    assert said(env.step("down")) == ("You bump into a wall.\nA .\n# G\nSteps left: 4", 0.0, False)
    assert said(env.step("Up.")) == ("You bump into a wall.\nA .\n# G\nSteps left: 3", 0.0, False)
    assert said(env.step("north")) == (
        "Reply with one word: up, down, left, right.\nA .\n# G\nSteps left: 2",
        0.0,
        False,
    )
    assert said(env.step(" RIGHT ")) == (". A\n# G\nSteps left: 1", 0.0, False)
    assert env.expert_action() == "down"
    assert said(env.step("down")) == ("You reached G.", 1.0, True)
    env = start("GridWorld", state={**MAZE, "left": 1}, size=2)
    assert said(env.step("right")) == ("Out of steps.", 0.0, True)


def test_grid_world_shortest_path() -> None:
    assert shortest_path(2, 2, frozenset({(1, 0)}), (0, 0), (1, 1)) == ["right", "down"]
    assert shortest_path(2, 2, frozenset({(1, 0), (0, 1)}), (0, 0), (1, 1)) is None
    assert shortest_path(3, 3, frozenset(), (1, 1), (1, 1)) == []
    for seed in range(20):
        env = start("GridWorld", seed, size=7, walls=0.6)
        path = shortest_path(7, 7, env.walls, env.here, env.goal)
        assert path is not None
        assert 1 <= len(path) <= env.max_steps
